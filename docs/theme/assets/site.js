// Elements that the theme's script adds, for readers with a keyboard or a screen reader: the buttons of each block of code are no
// landmark of the page, and a table that is wider than its page can be scrolled by keys.
new MutationObserver(() => {
  document.querySelectorAll(".md-code__nav:not([role])").forEach((each) => each.setAttribute("role", "none"));
  document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])").forEach((each) => {
    if (each.scrollWidth > each.clientWidth) each.tabIndex = 0;
  });
}).observe(document.body, { childList: true, subtree: true });

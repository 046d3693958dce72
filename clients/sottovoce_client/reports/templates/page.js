"use strict";
// A table can be scrolled by keyboard only if it is wider than the page.
const regions = [...document.querySelectorAll(".wide")];
const setTabStops = () => regions.forEach((each) => { if (each.clientWidth) each.tabIndex = each.scrollWidth > each.clientWidth ? 0 : -1; });
addEventListener("resize", setTabStops);
document.addEventListener("toggle", setTabStops, true);
setTabStops();

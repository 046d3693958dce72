"use strict";
// A table scrolls by keyboard only where there is more of it than is seen.
const regions = [...document.querySelectorAll(".wide")];
const reach = () => regions.forEach((each) => { if (each.clientWidth) each.tabIndex = each.scrollWidth > each.clientWidth ? 0 : -1; });
addEventListener("resize", reach);
document.addEventListener("toggle", reach, true);
reach();

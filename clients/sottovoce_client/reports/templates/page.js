"use strict";
// Values under the pointer, or step by step with the arrow keys. The page is whole without it.
const SIZE = 10000;
const digits = (value) => {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  return value.toLocaleString("en", size >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 4 });
};
const said = {
  number: digits,
  count: (value) => Math.round(value).toLocaleString("en"),
  share: (value) => `${(100 * value).toFixed(1)} %`,
};
function axis(text) {
  const [low, high, kind, form] = text.split(" ");
  const [a, b] = kind === "log" ? [Math.log10(low), Math.log10(high)] : [+low, +high];
  return (at) => {
    const value = a + (b - a) * at;
    // No more than the drawing knows.
    return said[form](kind === "log" ? 10 ** value : Math.abs(value) < Math.abs(b - a) / SIZE ? 0 : value).replace("-", "−");
  };
}
// A curve's points; each is written as seen from the one before it.
function points(path) {
  const drawn = path.getAttribute("d") || document.querySelector(path.getAttribute("href")).getAttribute("d"), found = [];
  for (const piece of drawn.split("M").slice(1)) {
    const steps = piece.match(/-?\d+/g).map(Number);
    for (let k = 0, x = 0, y = 0; k + 1 < steps.length; k += 2) found.push([(x += steps[k]), (y += steps[k + 1])]);
  }
  return found;
}
// Of points that lie above each other the last one.
function nearest(all, x) {
  let best = all[0];
  for (const each of all) if (Math.abs(each[0] - x) <= Math.abs(best[0] - x)) best = each;
  return best;
}
function follow(chart) {
  const svg = chart.querySelector("svg[data-x]");
  const inner = svg && svg.querySelector("svg");
  const paths = inner ? [...inner.querySelectorAll(":scope > [data-name]")] : [];
  if (!paths.length) return;
  const across = axis(svg.dataset.x), up = axis(svg.dataset.y), many = paths.length > 8;
  let known = null, at = -1;
  const curves = () => (known = known || paths.map((path) => [path, points(path)]).filter(([, all]) => all.length));
  const rule = document.createElement("div"), tip = document.createElement("div");
  rule.className = "pointer";
  tip.className = "tip";
  tip.setAttribute("role", "status");
  rule.hidden = tip.hidden = true;
  chart.append(rule, tip);
  const box = () => ({ left: parseFloat(getComputedStyle(chart).paddingLeft), width: svg.clientWidth, height: svg.clientHeight });
  const leave = () => {
    rule.hidden = tip.hidden = true;
    for (const path of paths) path.classList.remove("near");
  };
  function show(x, y) {
    let told = curves().map(([path, all]) => [path, nearest(all, x)]);
    if (many && y !== null) told = [told.reduce((a, b) => (Math.abs(b[1][1] - y) < Math.abs(a[1][1] - y) ? b : a))];
    if (many && y === null) told = told.slice(0, 1);
    const place = told.reduce((a, b) => (Math.abs(b[1][0] - x) < Math.abs(a[1][0] - x) ? b : a))[1][0];
    for (const path of paths) path.classList.toggle("near", many && path === told[0][0]);
    const head = document.createElement("b");
    head.textContent = `${svg.dataset.across} ${across(place / SIZE)}`;
    tip.replaceChildren(head, ...told.map(([path, [, value]]) => {
      const line = document.createElement("div");
      line.className = path.getAttribute("class").replace("line", "told").replace(" near", "");
      line.textContent = `${path.dataset.name}: ${up(1 - value / SIZE)}`;
      return line;
    }));
    const { left, width, height } = box(), seen = left + (place / SIZE) * width;
    rule.style.left = `${seen}px`;
    rule.style.height = `${height}px`;
    rule.hidden = tip.hidden = false;
    tip.style.left = `${Math.max(0, Math.min(chart.clientWidth - tip.offsetWidth, seen > left + width / 2 ? seen - tip.offsetWidth - 12 : seen + 12))}px`;
  }
  chart.addEventListener("pointermove", (event) => {
    const { left, width, height } = box(), area = chart.getBoundingClientRect();
    const x = (event.clientX - area.left - left) / width, y = (event.clientY - area.top - parseFloat(getComputedStyle(chart).paddingTop)) / height;
    if (x < -0.02 || x > 1.02) leave();
    else show(SIZE * x, SIZE * y);
  });
  chart.addEventListener("pointerleave", leave);
  chart.addEventListener("blur", leave);
  chart.tabIndex = 0;
  chart.setAttribute("role", "group");
  chart.setAttribute("aria-label", `${svg.getAttribute("aria-label")}. Arrow keys read values`);
  chart.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") leave();
    if (!step) return;
    event.preventDefault();
    const places = curves().reduce((a, b) => (b[1].length > a[1].length ? b : a))[1];
    at = Math.max(0, Math.min(places.length - 1, at + step * Math.max(1, Math.round(places.length / 40))));
    show(places[at][0], null);
  });
}
for (const chart of document.querySelectorAll(".chart")) follow(chart);
// A table scrolls by keyboard only where there is more of it than is seen.
const regions = [...document.querySelectorAll(".wide")];
const reach = () => regions.forEach((each) => { if (each.clientWidth) each.tabIndex = each.scrollWidth > each.clientWidth ? 0 : -1; });
addEventListener("resize", reach);
document.addEventListener("toggle", reach, true);
reach();

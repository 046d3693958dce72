// Shows the state that the console sends once a second. Names and details come from other machines: all text is set as text.
"use strict";

const at = (id) => document.getElementById(id);
const address = new URL(location.href);
const run = address.searchParams.get("run") || "";
if (address.searchParams.has("token")) {
  // A cookie holds the token now. In the address it could be read off the screen, and copied.
  address.searchParams.delete("token");
  history.replaceState(null, "", address);
}

// ---- numbers, written as on the other pages -------------------------------------------------------------------------

const MISSING = "–";
const integer = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const count = (value) => integer.format(value);
const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

function number(value, digits = 3) {
  if (value === null || value === undefined) return MISSING;
  const given = Number(value);
  if (Number.isNaN(given)) return MISSING;
  if (!Number.isFinite(given)) return given > 0 ? "∞" : "−∞";
  const size = Math.abs(given);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return given.toExponential(digits - 1).replace("e+", "e").replaceAll("-", "−");
  return given.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? 15 : digits, maximumFractionDigits: size >= 1000 ? 0 : 6, roundingPriority: size >= 1000 ? "lessPrecision" : "auto" }).replace("-", "−");
}

function size(bytes) {
  if (bytes < 999.5) return plural(Math.round(bytes), "byte");
  for (const unit of ["kB", "MB", "GB"]) {
    bytes /= 1000;
    if (bytes < 999.5) return `${Number(bytes.toPrecision(3))} ${unit}`;
  }
  return `${Number((bytes / 1000).toPrecision(3))} TB`;
}

function duration(seconds) {
  if (seconds < 10) return `${number(seconds, 2)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${String(Math.round(seconds) % 60).padStart(2, "0")} s`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h ${String(Math.floor(seconds / 60) % 60).padStart(2, "0")} min`;
  return plural(Math.floor(seconds / 86400), "day");
}

function moment(unix) {
  const when = new Date(unix * 1000);
  const time = when.toLocaleTimeString("en-GB");
  return when.toDateString() === new Date().toDateString() ? time : `${when.toLocaleDateString("en-CA")} ${time}`;
}

const fraction = (part, all) => (all > 0 ? Math.min(1, Number(part) / all) : Number(part) > 0 ? 1 : 0);
const atDelta = (delta) => (delta > 0 ? ` at delta ${delta}` : "");

// ---- elements: created once, changed where a value has changed ------------------------------------------------------

function text(element, content) {
  if (element.textContent !== content) element.textContent = content;
  return element;
}
function name(element, classes) {
  if (element.className !== classes) element.className = classes;
}
function give(element, values) {
  for (const [key, value] of Object.entries(values)) {
    if (element.getAttribute(key) !== String(value)) element.setAttribute(key, value);
  }
  return element;
}
// Set a text in which backticks enclose commands.
function words(element, content) {
  if (element.dataset.words === content) return;
  element.dataset.words = content;
  element.replaceChildren(...content.split("`").map((part, i) => (i % 2 ? make("code", part) : document.createTextNode(part))));
}
function make(tag, content, kind) {
  const made = document.createElement(tag);
  if (content !== undefined) made.textContent = content;
  if (kind) made.className = kind;
  return made;
}
const draw = (tag, values) => give(document.createElementNS("http://www.w3.org/2000/svg", tag), values || {});
function share(bar, part) {
  const width = `${(100 * part).toFixed(1)}%`;
  if (bar.style.width !== width) bar.style.width = width;
}
function link(content, href) {
  const made = make("a", content);
  made.href = href;
  return made;
}

// Fill the rows of a table: `cells` gives each cell of an item, as text or as a function that fills it.
function rows(body, items, cells) {
  while (body.rows.length > items.length) body.deleteRow(-1);
  const heads = [...body.parentElement.tHead.rows[0].cells];
  items.forEach((item, i) => {
    const fresh = i >= body.rows.length;
    const row = fresh ? body.insertRow() : body.rows[i];
    cells(item, i).forEach((cell, k) => {
      if (fresh) {
        const made = make(k ? "td" : "th", undefined, heads[k].className);
        if (k) made.dataset.name = heads[k].textContent;
        else made.scope = "row";
        row.append(made);
      }
      if (typeof cell === "function") cell(row.cells[k]);
      else text(row.cells[k], cell);
    });
  });
}
// A cell whose elements `build` creates once; later calls change them.
function filled(cell, key, build) {
  if (cell.dataset.key !== key) {
    cell.dataset.key = key;
    cell.replaceChildren(...build());
  }
  return cell;
}
const GOOD = ["finished", "running", "complete"];
const BAD = ["failed", "lost", "budget exhausted"];
const NEAR = ["disconnected", "connecting", "stopped", "no answer"];
const tone = (state) => (BAD.includes(state) ? "bad" : NEAR.includes(state) ? "near" : GOOD.includes(state) ? "good" : "");
const pill = (state) => (cell) => {
  const [shown] = filled(cell, "pill", () => [make("span")]).children;
  name(shown, `state ${tone(state)}`.trim());
  text(shown, state);
};

// ---- the parts of the page ------------------------------------------------------------------------------------------

// True if the coordinator does not answer and the run had not ended at its last answer.
const unanswered = (page) => page.is_stale && Boolean(page.run) && !page.run.ended_at;

function head(page) {
  const now = page.run;
  document.title = now ? `${now.name}: ${now.state}` : "Sottovoce console";
  text(at("name"), now ? now.name : "No run yet");
  at("state").hidden = !now;
  for (const id of ["cards", "graph-part", "notices-part", "learners"]) at(id).hidden = !now;
  const facts = at("facts");
  const items = now
    ? [now.run_id, `${now.algorithm}`, plural(now.learners.length, "learner"), now.period_s ? `${now.clock}, a round every ${duration(now.period_s)}` : now.clock, `started ${moment(now.started_at)}`, now.ended_at ? `took ${duration(now.ended_at - now.started_at)}` : `for ${duration(page.time - now.started_at)}`]
    : ["The first run appears here as soon as it starts"];
  while (facts.children.length > items.length) facts.lastChild.remove();
  items.forEach((item, i) => text(facts.children[i] || facts.appendChild(make("span")), item));
  const report = now && page.reports.find((each) => each.run_id === now.run_id);
  at("report").hidden = !report;
  if (report) give(at("report"), { href: open(report.path) });
  if (now) {
    const state = unanswered(page) ? "no answer" : now.state;
    name(at("state"), `state ${tone(state)}`.trim());
    text(at("state"), state);
  }
}

function figure(id, content, more) {
  const place = at(id);
  filled(place, "figure", () => [document.createTextNode(""), make("small")]);
  if (place.firstChild.data !== content) place.firstChild.data = content;
  text(place.lastChild, more || "");
}

function cards(now) {
  const unbounded = now.rounds === null;
  figure("round", count(now.rounds_done), unbounded ? "" : ` of ${count(now.rounds)}`);
  at("done").parentElement.hidden = unbounded;
  share(at("done"), unbounded ? 0 : fraction(now.rounds_done, now.rounds));
  text(at("left"), now.ended_at ? "" : unbounded ? "until it is stopped" : now.remaining_s !== null ? `${duration(now.remaining_s)} to go` : "");
  figure("rate", number(now.rounds_per_second), " rounds/s");
  pace(now.recent_rates);
  text(at("pace-note"), now.ended_at ? "on average" : now.recent_rates.length > 1 ? `the last ${duration(now.recent_rates.length)}` : "");
  const limited = now.learners.filter((each) => each.epsilon_limit !== null).map((each) => ({ ...each, part: fraction(each.epsilon, each.epsilon_limit) }));
  const most = limited.reduce((a, b) => (a && a.part >= b.part ? a : b), null);
  const largest = now.learners.reduce((a, b) => Math.max(a, Number(b.epsilon)), 0);
  figure("spent", most ? `${number(100 * most.part)} %` : `ε ${number(largest)}`);
  name(at("spent-meter"), `meter ${most ? grade(most.part, now) : "none"}`.trim());
  share(at("spent-bar"), most ? most.part : 0);
  text(at("spent-note"), most ? `${most.name}: ε ${number(most.epsilon)} of ${number(most.epsilon_limit)}${atDelta(most.delta)}` : "no learner has a limit");
  const sum = (key) => now.learners.reduce((all, each) => all + (each[key] || 0), 0);
  figure("records", count(sum("records")), " in all");
  text(at("records-note"), `${!now.ended_at && now.learners.some((each) => each.records_per_second !== null) ? `${number(sum("records_per_second"))} a second, ` : ""}${count(sum("records_waiting"))} waiting`);
  const flow = now.edges.reduce((all, each) => all + each.forward_rate + each.backward_rate, 0);
  const sent = now.edges.reduce((all, each) => all + each.messages, 0);
  const bytes = now.edges.reduce((all, each) => all + each.bytes_per_second, 0);
  if (now.ended_at) figure("traffic", count(sent), ` ${unit(now)}`);
  else figure("traffic", number(flow), ` ${unit(now)}/s`);
  text(at("traffic-note"), now.ended_at ? "in the whole run" : `${count(sent)} so far, ${size(bytes)}/s`);
}

const unit = (now) => (now.capture === "wiretap" && now.traffic_source === "eavesdropper" ? "TLS records" : "messages");
// After a run a budget that is nearly used up warns of nothing.
const grade = (part, now) => (part >= 1 ? "bad" : part >= 0.9 && !now.ended_at ? "near" : "");

function pace(values) {
  const [area, line] = at("pace").children;
  const top = Math.max(...values, 1e-9) * 1.1;
  const step = 180 / Math.max(values.length - 1, 1);
  const points = values.map((value, i) => `${(i * step).toFixed(1)},${(29 - (27 * value) / top).toFixed(1)}`);
  give(line, { d: points.length > 1 ? `M${points.join("L")}` : "" });
  give(area, { d: points.length > 1 ? `M0,30L${points.join("L")}L180,30Z` : "" });
}

// ---- the graph: learners on a circle --------------------------------------------------------------------------------

const WIDTH = 720, HEIGHT = 500, FEW = 16;
const phone = matchMedia("(max-width: 620px)");
let drawn = "";
phone.addEventListener("change", () => {
  drawn = "";
  if (latest?.run) graph(latest.run);
});

function place(i, n) {
  const angle = (2 * Math.PI * i) / n - Math.PI / 2;
  const reach = n === 1 ? 0 : n <= FEW ? 180 : 175;
  return { x: WIDTH / 2 + reach * Math.cos(angle), y: HEIGHT / 2 + reach * Math.sin(angle), angle };
}

function plan(now) {
  const n = now.learners.length;
  // A phone shows no names, so the circle fills the picture.
  give(at("graph"), { class: n > FEW ? "many" : "", viewBox: n > FEW && phone.matches ? "165 55 390 390" : `0 0 ${WIDTH} ${HEIGHT}` });
  at("edges").replaceChildren(...now.edges.map((edge) => {
    const a = place(edge.a, n), b = place(edge.b, n);
    const ends = { x1: a.x.toFixed(1), y1: a.y.toFixed(1), x2: b.x.toFixed(1), y2: b.y.toFixed(1) };
    const group = draw("g");
    group.append(draw("title"), draw("line", { class: "edge", ...ends }), draw("line", { class: "touch", ...ends }));
    if (edge.is_one_way) group.append(draw("path", { class: "arrow", d: arrow(a, b) }));
    return group;
  }));
  at("nodes").replaceChildren(...now.learners.map((learner, i) => {
    const { x, y, angle } = place(i, n);
    const group = draw("g", { class: "node", transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` });
    const label = draw("text", n > FEW ? radial(angle) : around(angle, n));
    label.textContent = learner.name.length > 14 ? `${learner.name.slice(0, 13)}…` : learner.name;
    group.append(draw("title"), draw("circle", { r: n > FEW ? 6.5 : 15 }), label);
    return group;
  }));
}

function arrow(a, b) {
  const length = Math.hypot(b.x - a.x, b.y - a.y) || 1, ux = (b.x - a.x) / length, uy = (b.y - a.y) / length;
  const x = b.x - 20 * ux, y = b.y - 20 * uy, corner = (s) => `${(x - 12 * ux + s * 6 * uy).toFixed(1)},${(y - 12 * uy - s * 6 * ux).toFixed(1)}`;
  return `M${x.toFixed(1)},${y.toFixed(1)}L${corner(1)}L${corner(-1)}Z`;
}
function around(angle, n) {
  const across = n === 1 ? 0 : Math.cos(angle), down = n === 1 ? 1 : Math.sin(angle);
  return { x: (28 * across).toFixed(1), y: (34 * down + 6).toFixed(1), "text-anchor": Math.abs(across) < 0.3 ? "middle" : across > 0 ? "start" : "end" };
}
function radial(angle) {
  const left = Math.cos(angle) < -1e-9, turn = (angle * 180) / Math.PI + (left ? 180 : 0);
  return { transform: `rotate(${turn.toFixed(1)})`, x: left ? -12 : 12, y: 4, "text-anchor": left ? "end" : "start" };
}

function graph(now) {
  const shape = JSON.stringify([now.run_id, now.learners.map((each) => each.name), now.edges.map((each) => [each.a, each.b, each.is_one_way])]);
  if (shape !== drawn) plan(now);
  drawn = shape;
  const rates = now.edges.map((each) => each.forward_rate + each.backward_rate), fastest = Math.max(0, ...rates);
  const most = Math.max(1, ...now.edges.map((each) => each.messages)), slim = now.edges.length > 60 ? 0.35 : 1;
  const [name_a, name_b] = [(each) => now.learners[each.a]?.name, (each) => now.learners[each.b]?.name];
  now.edges.forEach((edge, i) => {
    const [title, line, , head] = at("edges").children[i].children;
    const flows = !now.ended_at && rates[i] > 0;
    // Without current traffic, the width shows the messages so far.
    const part = flows ? rates[i] / fastest : edge.messages / most;
    give(line, { class: flows ? "edge flows" : "edge", "stroke-width": (slim * (1 + (flows ? 6 : 3) * part)).toFixed(2) });
    if (head) give(head, { class: flows ? "arrow flows" : "arrow" });
    text(title, `${name_a(edge)} ${edge.is_one_way ? "→" : "–"} ${name_b(edge)}: ${number(rates[i])} ${unit(now)}/s, ${size(edge.bytes_per_second)}/s; ${count(edge.messages)} so far`);
  });
  now.learners.forEach((each, i) => {
    const [title] = at("nodes").children[i].children;
    const look = ["running", "connecting"].includes(each.state) ? "" : each.state === "disconnected" ? "gone" : tone(each.state) || "idle";
    give(at("nodes").children[i], { class: `node ${look}`.trim() });
    text(title, `${each.name}: ${each.state}, round ${count(each.rounds_done)}`);
  });
  const source = now.traffic_source === "eavesdropper" ? "Counted by the eavesdropper" : "Counted by the learners";
  const busiest = now.edges[rates.indexOf(fastest)];
  text(at("graph-words"), !now.edges.length ? "The edges are not known: the run has a graph of its own code, or one learner."
    : `${plural(now.learners.length, "learner")}, ${plural(now.edges.length, "edge")}. ${source}. ${fastest > 0 && !now.ended_at ? `A wider edge carries more messages a second: up to ${number(fastest)} ${unit(now)}, between ${name_a(busiest)} and ${name_b(busiest)}.` : "No traffic now: a wider edge has carried more messages."}`);
  if (at("edge-details").open) edges(now);
  at("edge-details").hidden = !now.edges.length;
}

function edges(now) {
  rows(at("edge-rows"), now.edges, (each) => [`${now.learners[each.a]?.name} ${each.is_one_way ? "→" : "–"} ${now.learners[each.b]?.name}`, number(each.forward_rate), each.is_one_way ? MISSING : number(each.backward_rate), size(each.bytes_per_second), count(each.messages)]);
}

const SHORT = 6, unfolded = new Set();

// ---- tables ---------------------------------------------------------------------------------------------------------

function learners(now) {
  document.body.classList.toggle("accurate", now.learners.some((each) => each.accuracy !== null));
  rows(at("learner-rows"), now.learners, (each) => [
    (cell) => text(give(filled(cell, "name", () => [make("span")]), { title: each.address }).firstChild, each.name),
    (cell) => {
      const [shown, since] = filled(cell, "state", () => [make("span"), make("small")]).children;
      name(shown, `state ${tone(each.state)}`.trim());
      text(shown, each.state);
      text(since, each.disconnected_since ? `since ${moment(each.disconnected_since)}` : "");
    },
    count(each.rounds_done),
    (cell) => budget(cell, each, now),
    count(each.records),
    each.records_per_second === null ? MISSING : `${number(each.records_per_second)}/s`,
    count(each.records_waiting),
    each.accuracy === null ? MISSING : `${(100 * each.accuracy).toFixed(1)} %`,
  ]);
}


function budget(cell, each, now) {
  cell.classList.add("budget");
  const [spent, meter, more] = filled(cell, "budget", () => {
    const bar = make("div", undefined, "meter");
    bar.append(make("i"));
    return [make("span"), bar, make("small")];
  }).children;
  const limited = each.epsilon_limit !== null, part = limited ? fraction(each.epsilon, each.epsilon_limit) : 0;
  text(spent, limited ? `${number(each.epsilon)} of ${number(each.epsilon_limit)}${atDelta(each.delta)}` : `${number(each.epsilon)}${atDelta(each.delta)}, no limit`);
  name(meter, `meter ${limited ? grade(part, now) : "none"}`.trim());
  give(meter, { role: "img", "aria-label": limited ? `${number(100 * part)} % used` : "no limit" });
  share(meter.firstChild, part);
  text(more, each.epsilon_owner_budget === null ? "" : `owner's budget for all runs: ${number(each.epsilon_owner_budget)}${atDelta(each.owner_delta)}; spent in other runs: ${number(each.epsilon_other_runs)}`);
}

function notices(now, captures) {
  const all = [
    ...(now.ended_at && now.state !== "finished" ? [["bad", "", `The run ${now.state}${now.detail ? `: ${now.detail}` : ""}`]] : []),
    ...now.warnings.map((warning) => ["bad", "", warning]),
    ...captures.filter((each) => each.run_id === now.run_id && /detect|missing/.test(each.state)).map((each) => ["bad", "", `capture: ${each.state}`]),
    ...now.learners.flatMap((each) => (each.disconnected_since ? [["near", each.name, `is disconnected since ${moment(each.disconnected_since)}`]] : [])),
    ...now.learners.flatMap((each) => each.warnings.map((warning) => ["near", each.name, warning])),
  ];
  const list = at("notices"), shown = all.slice(0, 40);
  if (all.length > shown.length) shown.push(["", "", `and ${all.length - shown.length} more`]);
  if (!shown.length) shown.push(["", "", "None."]);
  while (list.children.length > shown.length) list.lastChild.remove();
  shown.forEach(([kind, learner, notice], i) => {
    const item = list.children[i] || list.appendChild(make("li"));
    filled(item, "notice", () => [make("b"), make("span")]);
    name(item, kind);
    text(item.firstChild, learner ? `${learner} ` : "");
    words(item.lastChild, notice);
  });
  return all.map(([, learner, notice]) => (learner ? `${learner}: ${notice}` : notice));
}

// Format an e-value, given its natural logarithm.
function power(log) {
  const given = Number(log);
  if (!Number.isFinite(given)) return given > 0 ? "∞" : "0";
  if (given > -7 && given < 11) return number(Math.exp(given), given < 4 ? 2 : 3);
  const ten = given / Math.LN10, exponent = Math.floor(ten);
  return `${Math.min(9, Math.round(10 ** (ten - exponent)))}e${exponent}`.replace("-", "−");
}

function watch(view) {
  at("watch").hidden = !view;
  // The captures stand below the graph if the watch fills the other column.
  const column = at(view ? "graph-part" : "notices-part").parentElement;
  if (at("captures").parentElement !== column) column.append(at("captures"));
  if (!at("reports").matches(":last-child")) at("reports").parentElement.append(at("reports"));
  if (!view) return;
  const combined = view.combined ? [{ ...view.combined, name: "combined" }] : [];
  // Of many learners, list those nearest to an alarm.
  const nearest = [...view.learners].sort((a, b) => Number(b.log_e_value) - Number(a.log_e_value));
  const short = view.learners.length > FEW && !unfolded.has("watch");
  const all = [...combined, ...(short ? nearest.slice(0, SHORT) : view.learners)];
  at("all-watch").hidden = !short;
  text(at("all-watch"), `Show all ${view.learners.length}`);
  const line = view.combined?.log_threshold;
  text(at("watch-words"), view.alarms ? `ALARM: the noise does not have the claimed distribution (${plural(view.alarms, "alarm")}).`
    : `No alarm so far, in round ${count(Math.max(0, ...all.map((each) => each.rounds)))}.${line ? ` The combined e-value raises an alarm from ${power(line)} on.` : ""}`);
  name(at("watch-words"), view.alarms ? "note over" : "note");
  rows(at("watch-rows"), all, (each) => [
    each.name,
    (cell) => { name(cell, each.log_threshold !== null && Number(each.log_e_value) >= each.log_threshold ? "over" : ""); text(cell, power(each.log_e_value)); },
    (cell) => {
      const [meter] = filled(cell, "meter", () => { const bar = make("div", undefined, "meter"); bar.append(make("i")); return [bar]; }).children;
      const part = each.log_threshold ? Math.max(0, Math.min(1, Number(each.log_e_value) / each.log_threshold)) : 0;
      name(meter, `meter ${part >= 1 ? "bad" : part >= 0.5 ? "near" : ""}`.trim());
      share(meter.firstChild, part);
    },
    each.change_log_e_value === null ? MISSING : power(each.change_log_e_value),
  ]);
}

const open = (path) => `files/${path.split("/").map(encodeURIComponent).join("/")}`;
const linked = (content, href, more) => (cell) => {
  filled(cell, `link ${href}`, () => [href ? link("", href) : make("span"), make("small")]);
  text(cell.firstChild, content);
  text(cell.lastChild, more || "");
};

// Fill a list with its newest entries; the button below it shows all.
function list(id, found, cells) {
  const short = found.length > SHORT && !unfolded.has(id), more = at(`all-${id}`);
  rows(at(`${id}-rows`), short ? found.slice(0, SHORT) : found, cells);
  more.hidden = !short;
  text(more, `Show all ${found.length}`);
  at(`no-${id}`).hidden = found.length > 0;
  at(`${id}-rows`).parentElement.hidden = !found.length;
}

// A cell with a text and a smaller note below it.
const noted = (content, note, without) => (cell) => {
  const [first, second] = filled(cell, "noted", () => [make("span"), make("small")]).children;
  text(first, content);
  text(second, without ? "" : note);
};

function lists(page) {
  const here = (each) => (page.run && each.run_id === page.run.run_id ? "shown here" : "");
  list("runs", page.runs, (each) => [
    linked(each.run_id, `?run=${encodeURIComponent(each.run_id)}`, [here(each), each.detail].filter(Boolean).join(": ")),
    pill(each.state), noted(moment(each.started_at), `took ${duration(Math.max(0, (each.ended_at || page.time) - each.started_at))}`, !each.ended_at), count(each.rounds_done),
  ]);
  list("captures", page.captures, (each) => [linked(each.name, each.path ? open(each.path) : "", each.path ? "" : each.location), each.state, count(each.messages), size(each.bytes)]);
  list("reports", page.reports, (each) => [linked(each.title, open(each.path), each.path), moment(each.modified_at), size(each.bytes)]);
  text(at("no-reports"), page.folder ? `None yet in ${page.folder}.` : "No results folder was given: sottovoce console FOLDER.");
  text(at("foot"), `This page only displays: it changes nothing. Sottovoce ${page.version}${page.folder ? `; results in ${page.folder}` : ""}.`);
}
for (const id of ["runs", "captures", "reports", "watch"]) {
  at(`all-${id}`).addEventListener("click", () => {
    unfolded.add(id);
    if (latest) show(latest);
    at(`${id}-rows`).rows[SHORT]?.querySelector("a")?.focus();
  });
}

// After a run has ended its services may be gone, which is no problem: `calm`.
function problems(found, calm) {
  const list = at("problems");
  while (list.children.length > found.length) list.lastChild.remove();
  found.forEach((each, i) => {
    const banner = list.children[i] || list.appendChild(make("div", undefined, "banner"));
    name(banner, calm ? "banner calm" : "banner");
    filled(banner, "problem", () => [make("strong"), make("span")]);
    text(banner.firstChild, `Since ${moment(each.first_seen)}: `);
    words(banner.lastChild, each.text);
  });
}

// ---- announcements for screen readers: changes that matter ----------------------------------------------------------

let before = null;
function announce(message) {
  text(at("announcement"), message);
}
function announceChanges(page, noticed) {
  const now = page.run && { id: page.run.run_id, state: page.run.state, noticed, alarms: page.watch ? page.watch.alarms : 0, problems: page.problems.length };
  if (before && now && before.id === now.id) {
    const news = now.noticed.filter((each) => !before.noticed.includes(each)).slice(0, 3);
    if (now.state !== before.state) news.unshift(`The run is ${now.state}`);
    if (now.alarms > before.alarms) news.unshift("The watch raises an alarm");
    if (now.problems > before.problems) news.unshift(page.problems[0].text);
    if (news.length) announce(news.join(". "));
  }
  before = now;
}

function show(page) {
  document.body.classList.remove("waiting");
  head(page);
  problems(page.problems, !page.run || Boolean(page.run.ended_at));
  document.body.classList.toggle("stale", unanswered(page));
  let noticed = [];
  if (page.run) {
    cards(page.run);
    graph(page.run);
    noticed = notices(page.run, page.captures);
    watch(page.watch);
    learners(page.run);
  }
  lists(page);
  announceChanges(page, noticed);
}

// ---- the connection, which is opened again after errors -------------------------------------------------------------

const SILENT_MS = 12000, AGAIN_MS = 1500;
let stream = null, silent = 0, again = 0, lost = null, last = null, reason = "";

function connected() {
  clearTimeout(silent);
  silent = setTimeout(() => { disconnected(); reopen(); }, SILENT_MS);
  if (lost) {
    lost = null;
    reason = "";
    at("lost").hidden = true;
    announce("Connected again");
  }
}

function disconnected(why) {
  reason = why || reason;
  lost = lost || last || new Date();
  document.body.classList.add("stale");
  filled(at("lost"), "lost", () => [make("strong"), document.createTextNode("")]);
  const since = `Not connected since ${moment(lost / 1000)}. `;
  if (at("lost").hidden) announce(since + reason);
  at("lost").hidden = false;
  text(at("lost").firstChild, since);
  const more = reason || "The page shows the state of that time, and connects again by itself.";
  if (at("lost").lastChild.data !== more) at("lost").lastChild.data = more;
}

function reopen() {
  if (stream) stream.close();
  clearTimeout(again);
  stream = new EventSource(`events${run ? `?run=${encodeURIComponent(run)}` : ""}`);
  stream.onmessage = (event) => {
    last = new Date();
    connected();
    const page = JSON.parse(event.data);
    latest = page;
    show(page);
  };
  stream.onerror = () => {
    disconnected();
    if (stream.readyState !== EventSource.CLOSED) return; // the browser connects again by itself
    again = setTimeout(async () => {
      try {
        const answer = await fetch("console.css", { cache: "no-store" });
        if (answer.status === 403) disconnected("The console was started again with another token: open the address that it printed.");
      } catch { /* no server yet */ }
      reopen();
    }, AGAIN_MS);
  };
}

let latest = null;
at("edge-details").addEventListener("toggle", () => { if (latest && latest.run) edges(latest.run); });
// A hidden page closes its stream, so that the console stops polling the services.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    clearTimeout(silent);
    clearTimeout(again);
    if (stream) stream.close();
  } else reopen();
});
if (!document.hidden) reopen();

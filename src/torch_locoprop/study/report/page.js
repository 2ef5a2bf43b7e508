// The page: the task and the options that the reader chose, and the sections of the page.
// The fragment of the address keeps these choices (address.js).
"use strict";

const report = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

const choice = { loss: "train", x: "epoch", y: "linear", range: "final", runs: "mean" };
const CHOICES = [
  { key: "loss", label: "Images", options: [["train", "Train"], ["test", "Test"]] },
  { key: "x", label: "Horizontal axis", options: [["epoch", "By epoch"], ["seconds", "By seconds"]] },
  { key: "y", label: "Vertical axis", options: [["linear", "Linear"], ["log", "Log"]] },
  { key: "range", label: "Losses shown", options: [["final", "Final differences"], ["whole", "Whole run"]] },
  { key: "runs", label: "Seeds", options: [["mean", "Mean and range"], ["every", "Every run"]] },
];

let task = report.tasks[0];
let hidden = new Set();
let view = null;
/** The epoch or the seconds under the pointer, or null. */
let pointed = null;

/** A toggle button. */
function pressable(text, pressed, press, more = {}) {
  return element("button", { type: "button", "aria-pressed": String(pressed), click: press, ...more }, text);
}

/** Replace the children of some elements and keep the keyboard's focus. */
function replaceKeepingFocus(...replacements) {
  const key = document.activeElement?.dataset?.focus;
  for (const [place, children] of replacements) place.replaceChildren(...children);
  for (const [place] of key ? replacements : []) place.querySelector(`[data-focus="${CSS.escape(key)}"]`)?.focus();
}

function drawChoices() {
  const several = task.series.some((series) => series.runs.length > 1);
  const groups = CHOICES.filter(({ key }) => key !== "runs" || several).map(({ key, label, options }) => {
    const buttons = options.map(([value, text]) => {
      const choose = () => { choice[key] = value; drawAll(); };
      return pressable(text, choice[key] === value, choose, { "data-focus": `${key} ${value}` });
    });
    return element("div", { class: "choice", role: "group", "aria-label": label }, ...buttons);
  });
  replaceKeepingFocus([byId("choices"), groups]);
}

function legendValue(series) {
  return series.state === "finished" ? shown(series[choice.loss]?.mean) : series.remark;
}

/** Return the rows of the legend and of the series below it: by rank with final losses, or by the losses under the pointer. */
function legendRows() {
  const rows = task.series.map((series, at) => {
    const seeds = series.seeds.length > 1 ? `${series.seeds.length} seeds` : "";
    if (pointed === null) return { series, at, value: legendValue(series), note: seeds };
    const { mean, low, high, number } = lossAt(series, choice, pointed);
    const range = seeds && mean !== null ? `${shown(low)} to ${shown(high)}, ${number} of ${seeds}` : seeds;
    return { series, at, value: shown(mean), note: range, mean };
  });
  if (pointed === null) return rows;
  const order = (row) => (hidden.has(row.at) ? 2 : Number(row.mean === null));
  return rows.sort((a, b) => order(a) - order(b) || a.mean - b.mean || a.at - b.at);
}

function legendTitle() {
  if (pointed === null) return `final ${choice.loss} loss`;
  const where = choice.x === "seconds" ? `after ${pointed.toPrecision(3)} seconds` : `at epoch ${pointed}`;
  return `${choice.loss} loss ${where}`;
}

function drawLegend() {
  const entries = legendRows().map(({ series, at, value, note }) => {
    const toggle = () => {
      if (hidden.has(at)) hidden.delete(at);
      else hidden.add(at);
      drawAll();
    };
    const more = { class: "entry", "data-focus": `series ${at}`, "data-label": series.label };
    const button = pressable("", !hidden.has(at), toggle, more);
    button.append(swatch(series),
      element("span", { class: "name" }, series.label, note ? element("small", {}, note) : ""),
      element("span", { class: "value" }, value));
    return button;
  });
  const all = new Set(task.series.keys());
  const set = (wanted) => () => { hidden = wanted; drawAll(); };
  const both = element("div", { class: "both" },
    element("button", { type: "button", "data-focus": "all", click: set(new Set()) }, "Show all"),
    element("button", { type: "button", "data-focus": "none", click: set(all) }, "Hide all"));
  const title = element("div", { class: "title" }, legendTitle());
  byId("curves").classList.toggle("many", task.series.length > ROOMY);
  const beside = element("div", { class: "entries" }, ...entries.slice(0, SHOWN_AT_FIRST));
  replaceKeepingFocus(
    [byId("legend"), [title, beside, both]],
    [byId("others"), entries.slice(SHOWN_AT_FIRST)]);
}

/** Show the losses under the pointer in the legend, so that nothing covers the plot. */
function point(where) {
  pointed = where;
  drawLegend();
}

function drawNotes() {
  const above = aboveView(task, choice, hidden).map((series) => `${series.label} (${legendValue(series)})`);
  const total = task.series.length;
  byId("out-of-view").textContent = [
    hidden.size ? `Switched off: ${hidden.size} of ${total} series; press one in the list to see it.` : "",
    above.length ? `Ends above the view: ${above.join(", ")}.` : "",
  ].join(" ");
  const clock = byId("clock");
  clock.hidden = choice.x !== "seconds";
  clock.classList.toggle("warning", task.clock.warning);
  clock.textContent = task.clock.text;
}

function drawAll() {
  pointed = null;
  drawChoices();
  drawLegend();
  drawNotes();
  remember();
  return drawCurves(byId("plot"), task, choice, hidden);
}

function drawTasks() {
  const place = byId("tasks");
  place.hidden = report.tasks.length < 2;
  const buttons = report.tasks.map((each, at) =>
    pressable(each.tab, each === task, () => show(each), {
      "data-focus": `task ${at}`, title: `${each.title} · ${each.details}`,
    }));
  replaceKeepingFocus([place, buttons]);
  // On a narrow screen the tasks are one row that scrolls.
  const chosen = place.querySelector("[aria-pressed=true]");
  if (chosen) place.scrollLeft = chosen.offsetLeft - (place.clientWidth - chosen.offsetWidth) / 2;
}

function drawGallery() {
  const { rows, missing } = task.gallery;
  byId("reconstructions").hidden = !rows.length && !missing.length;
  byId("gallery").replaceChildren(...rows.map((row) => {
    const images = row.images.map((source) => element("img", { src: source, alt: "" }));
    const note = row.note && images.length ? element("small", {}, row.note) : null;
    const name = element("div", { class: "name" }, element("b", {}, row.label), note);
    if (row.colour) name.firstChild.style.color = inked(row.colour);
    const strip = images.length
      ? element("div", { class: "strip", role: "img", "aria-label": `${images.length} test images: ${row.label}` }, ...images)
      : element("div", { class: "strip none" }, row.note);
    return element("div", { class: "row" }, name, strip);
  }));
  byId("missing").replaceChildren(...(missing.length ? [
    element("p", {}, rows.length ? "No reconstructions of" : "No reconstructions:"),
    element("ul", {}, ...missing.map((why) => element("li", {}, why))),
  ] : []));
}

function drawEnvironments() {
  const all = task.environments;
  const names = [...new Set(all.flatMap((each) => Object.keys(each.is)))];
  const line = (name, values) => element("tr", {}, element("th", { scope: "row" }, name),
    ...values.map((value) => element("td", {}, value)));
  const text = (value) => (value === undefined ? "–" : setting(value));
  byId("environments").replaceChildren(element("tbody", {},
    line("environment", all.map((each) => each.name)),
    ...names.map((name) => line(name, all.map((each) => text(each.is[name])))),
    line("runs", all.map((each) => String(each.runs)))));
  const data = Object.entries(task.about.data).map(([name, value]) => `${name} ${setting(value)}`);
  byId("data-note").textContent = `Data: ${data.join(", ")}.`;
}

function drawTable() {
  drawRanking(byId("ranking"), task, view, remember);
  remember();
}

/** Return the indices of the series that are hidden at first. */
function hiddenAtFirst(wanted) {
  return new Set([...wanted.series.keys()].slice(SHOWN_AT_FIRST));
}

/** Return the ranking's options of a task at first. */
function firstView(wanted) {
  const best = wanted.series[0].train?.mean;
  const level = best ? Number((1.05 * best).toPrecision(3)) : NaN;
  return { sort: "place", direction: 1, filter: "", level, columns: false, open: new Set() };
}

/** Show a task in its initial state, or with these options. */
function show(wanted, options = {}) {
  task = wanted;
  hidden = options.hidden ?? hiddenAtFirst(task);
  view = options.view ?? firstView(task);
  byId("filter").value = view.filter;
  byId("level").value = Number.isFinite(view.level) ? view.level : "";
  byId("columns").setAttribute("aria-pressed", String(view.columns));
  byId("expand").setAttribute("aria-pressed", "false");
  byId("columns").hidden = !task.varied.length;
  byId("task").textContent = `${task.title} · ${task.details}`;
  byId("summary").textContent = task.summary;
  byId("cautions").textContent = task.cautions.join(" ");
  const same = Object.entries(task.same).map(([name, value]) => `${name} ${setting(value)}`);
  byId("seconds").textContent = task.clock.text;
  byId("same").textContent = same.length && task.series.length > 1 ? `The same for all: ${same.join(", ")}.` : "";
  drawTasks();
  drawTable();
  drawGallery();
  drawEnvironments();
  return drawAll();
}

function press(id, change) {
  byId(id).addEventListener("click", () => {
    const on = byId(id).getAttribute("aria-pressed") !== "true";
    byId(id).setAttribute("aria-pressed", String(on));
    change(on);
    drawTable();
  });
}

function start() {
  byId("filter").addEventListener("input", (event) => { view.filter = event.target.value; drawTable(); });
  byId("level").addEventListener("input", (event) => { view.level = event.target.valueAsNumber; drawTable(); });
  press("columns", (on) => { view.columns = on; });
  press("expand", (on) => { view.open = new Set(on ? task.series.map((series) => series.label) : []); });
  const runs = report.tasks.flatMap((each) => each.series).reduce((sum, series) => sum + series.runs.length, 0);
  byId("footer").textContent = `${runs} ${runs === 1 ? "run" : "runs"} · torch-locoprop ${report.version} · this page needs no network`;
  byId("skipped-section").hidden = !report.skipped.length;
  byId("skipped").append(...report.skipped.map(({ folder, reason }) =>
    element("li", {}, element("code", {}, folder), ` ${reason}`)));
  document.querySelector("main").hidden = false;
  recall();
  byId("plot").on("plotly_hover", (event) => point(pointedAt(event, choice)));
  byId("plot").on("plotly_unhover", () => point(null));
  addEventListener("hashchange", recall);
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", () => { drawGallery(); drawTable(); drawAll(); });
  }
}

start();

// The ranking: a table with sorting, filtering and details. All text is inserted as text nodes.
"use strict";

/** Return an element with attributes, listeners (functions) and children (elements or strings). */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== null && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** Return a loss as text. */
function shown(value) {
  if (value === null || value === undefined) return "–";
  return Math.abs(value) < 1e5 ? value.toFixed(2) : value.toExponential(2);
}

function setting(value) {
  if (typeof value === "number" && value !== 0 && Math.abs(value) < 1e-3) return value.toExponential();
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Return a sample of the line of a series. */
function swatch(series) {
  const mark = document.getElementById("swatch").content.firstElementChild.cloneNode(true);
  const piece = mark.firstElementChild;
  piece.style.stroke = inked(series.colour);
  piece.style.strokeDasharray = dashes(series);
  return mark;
}

function spreadCell(point, digits = 2) {
  if (!point) return "–";
  const number = (value) => (digits === 2 ? shown(value) : value.toFixed(digits));
  if (number(point.low) === number(point.high)) return number(point.mean);
  const extremes = `${number(point.low)} to ${number(point.high)}`;
  return element("span", {}, number(point.mean), element("small", {}, extremes));
}

/** Return seconds as text; those of a run are marked where other series have timings. */
function secondsCell(series, task) {
  const cell = spreadCell(series.seconds, 1);
  const own = task.clock.alone && !series.alone && series.seconds;
  return own ? element("span", {}, cell, element("small", {}, "own")) : cell;
}

/** Return the first epoch whose mean train loss is at or below the level, or null. */
function reached(series, level) {
  const epoch = series.curve.train.mean.findIndex((value) => value !== null && value <= level);
  return Number.isFinite(level) && epoch >= 0 ? epoch : null;
}

function methodCell(series) {
  const remark = series.remark ? element("span", { class: "remark" }, series.remark) : null;
  // Lines end between words, not behind the hyphen of locoprop-m or 2e-05.
  const words = series.label.split(" ").flatMap((word) => [element("span", { class: "word" }, word), " "]);
  const text = element("span", {}, ...words, remark);
  return element("span", { class: "named" }, swatch(series), text);
}

/** Return the columns: a heading, the value to sort by, and the content. */
function rankingColumns(task, view) {
  const mean = (name) => (series) => (series[name] ? series[name].mean : null);
  const alone = (series) => (task.clock.alone && !series.alone ? null : mean("seconds")(series));
  const seconds = (series) => {
    const epoch = reached(series, view.level);
    return epoch === null ? null : series.curve_seconds[epoch];
  };
  const goal = Number.isFinite(view.level) ? String(view.level) : "…";
  const whole = (value) => (value === null ? "–" : String(value));
  const settings = !view.columns ? [] : task.varied.map((name) => ({
    key: `setting ${name}`,
    heading: name,
    value: (series) => series.hyper_parameters[name] ?? null,
    cell: (series) => (Object.hasOwn(series.hyper_parameters, name) ? setting(series.hyper_parameters[name]) : ""),
  }));
  const memory = task.series.some((series) => series.memory)
    ? [{ key: "memory", heading: "memory MiB", value: mean("memory"), cell: (s) => spreadCell(s.memory, 0) }]
    : [];
  return [
    { key: "place", heading: "#", value: (s) => s.place, cell: (s) => whole(s.place) },
    { key: "method", heading: "method", value: (s) => s.label, cell: methodCell, text: true },
    { key: "train", heading: "train loss", value: mean("train"), cell: (s) => spreadCell(s.train) },
    { key: "test", heading: "test loss", value: mean("test"), cell: (s) => spreadCell(s.test) },
    { key: "reach", heading: `epochs to ${goal}`, value: (s) => reached(s, view.level), cell: (s) => whole(reached(s, view.level)) },
    { key: "reach-seconds", heading: `seconds to ${goal}`, value: seconds, cell: (s) => (seconds(s) === null ? "–" : seconds(s).toFixed(1)) },
    { key: "seconds", heading: "seconds", value: alone, cell: (s) => secondsCell(s, task) },
    ...memory,
    { key: "seeds", heading: "seeds", value: (s) => s.seeds.length, cell: (s) => s.seeds.join(", ") },
    { key: "origin", heading: "settings from", value: (s) => s.origin, cell: (s) => s.origin, text: true },
    ...settings,
  ];
}

/** Compare two values; missing values are last in both directions. */
function compared(first, second, direction) {
  if (first === null || second === null) return (first === null) - (second === null);
  if (typeof first === "number" && typeof second === "number") return direction * (first - second);
  return direction * String(first).localeCompare(String(second), undefined, { numeric: true });
}

function sorted(series, columns, view) {
  const column = columns.find((each) => each.key === view.sort) ?? columns[0];
  return [...series].sort((a, b) => compared(column.value(a), column.value(b), view.direction));
}

function heading(column, view, redraw) {
  const active = view.sort === column.key;
  const order = view.direction > 0 ? "ascending" : "descending";
  const sort = () => {
    view.direction = active ? -view.direction : 1;
    view.sort = column.key;
    redraw();
    document.querySelector(`#ranking button[data-key="${CSS.escape(column.key)}"]`).focus();
  };
  const button = element("button", { type: "button", "data-key": column.key, click: sort }, column.heading);
  return element("th", { scope: "col", "data-key": column.key, class: column.text ? "text" : null, "aria-sort": active ? order : "none" }, button);
}

function copyButton(text, code) {
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
  const button = element("button", { type: "button", class: "copy", click: copy }, "Copy");
  return button;
}

function runBlock(run) {
  const code = element("code", {}, run.command);
  const last = (name) => shown(run[name].at(-1));
  const took = run.own_seconds === null ? "in a population" : `${run.own_seconds.toFixed(1)} s`;
  const words = `seed ${run.seed}: ${run.state}, epoch ${run.epoch}, train ${last("train")}, ` +
    `test ${last("test")}, ${took}, environment ${run.environment}, in `;
  return element("div", { class: "run" },
    element("p", {}, words, element("code", {}, run.folder)),
    element("div", { class: "command" }, code, copyButton(run.command, code)));
}

/** Return all hyper-parameters of a series, and its runs with the commands that repeat them. */
function details(series) {
  const entries = Object.entries(series.hyper_parameters).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, setting(value))));
  return element("div", { class: "details" }, element("dl", {}, ...entries), ...series.runs.map(runBlock));
}

function rows(series, columns, view, redraw) {
  const open = view.open.has(series.label);
  const toggle = () => {
    if (open) view.open.delete(series.label);
    else view.open.add(series.label);
    redraw();
    document.querySelector(`#ranking button[data-label="${CSS.escape(series.label)}"]`).focus();
  };
  const more = element("button", {
    type: "button", class: "more", "aria-expanded": String(open), "data-label": series.label,
    "aria-label": `Settings and runs of ${series.label}`, click: toggle,
  }, open ? "−" : "+");
  const cells = columns.map((column) =>
    element("td", { class: column.text ? "text" : null, "data-key": column.key }, column.cell(series)));
  const row = element("tr", { class: series.state, "data-label": series.label }, element("td", {}, more), ...cells);
  if (!open) return [row];
  return [row, element("tr", { class: "unfolded" }, element("td", { colspan: columns.length + 1 }, details(series)))];
}

/**
 * Draw the table of a task; `view` has sort, direction, filter, level, columns and open rows.
 * `changed` is called when the reader sorts it or opens a row.
 */
function drawRanking(table, task, view, changed) {
  const redraw = () => { drawRanking(table, task, view, changed); changed(); };
  const columns = rankingColumns(task, view);
  const wanted = view.filter.trim().toLowerCase();
  const matching = task.series.filter((series) => series.label.toLowerCase().includes(wanted));
  const body = sorted(matching, columns, view).flatMap((series) => rows(series, columns, view, redraw));
  const empty = element("tr", {}, element("td", { colspan: columns.length + 1 }, "No method matches."));
  table.replaceChildren(
    element("thead", {}, element("tr", {}, element("td"), ...columns.map((column) => heading(column, view, redraw)))),
    element("tbody", {}, ...(body.length ? body : [empty])));
}

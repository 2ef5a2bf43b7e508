// The curves: what plotly draws for a task, by the options that the reader chose.
"use strict";

/** Lengths in pixels of the strokes and gaps of dashed lines, before any dots. */
const STROKES = [10, 4, 20];
const SHOWN_AT_FIRST = 16;
/** A legend of more series than this has small rows. */
const ROOMY = 13;
/** The least contrast of a line with the page, as WCAG asks for graphics. */
const CONTRAST = 3;
/** The size in print is fixed, as a browser lays out a page for print after the last redraw. */
const PRINTED = { autosize: false, width: 680, height: 380 };

/** Return a colour of the document's theme. */
function themed(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Return the red, green and blue of a colour #rrggbb. */
function parts(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

/** Return the relative luminance of WCAG. */
function luminance(colour) {
  const linear = colour.map((part) => part / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

/** Return the colour of a series, lighter on a dark page, until it can be seen there. */
function inked(colour, opacity = 1) {
  const paper = luminance(parts(themed("--paper")));
  const mixed = (light) => parts(colour).map((part) => Math.round(part + (255 - part) * light));
  let light = Number(themed("--lighten"));
  const seen = () => (luminance(mixed(light)) + 0.05) / (paper + 0.05) >= CONTRAST;
  while (light > 0 && light < 1 && !seen()) light = Math.min(1, light + 0.04);
  return `rgba(${mixed(light).join(",")},${opacity})`;
}

/** Return the dashes of a series in the format of SVG; after all patterns, dots are added. */
function dashes(series) {
  if (series.dash === 0) return "none";
  const stroke = STROKES[(series.dash - 1) % STROKES.length];
  const dots = Math.floor((series.dash - 1) / STROKES.length);
  return `${stroke}px, 4px${", 2px, 4px".repeat(dots)}`;
}

/** Escape text for plotly, which interprets some markup in names. */
function plain(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function abscissae(series, seconds, choice) {
  return choice.x === "seconds" ? seconds : series.curve.train.mean.map((_, epoch) => epoch);
}

function band(series, choice) {
  const { low, high } = series.curve[choice.loss];
  const x = abscissae(series, series.curve_seconds, choice);
  const at = x.map((_, index) => index).filter((index) => low[index] !== null);
  const back = [...at].reverse();
  return {
    x: [...at, ...back].map((index) => x[index]),
    y: [...at.map((index) => high[index]), ...back.map((index) => low[index])],
    fill: "toself",
    fillcolor: inked(series.colour, 0.14),
    line: { width: 0 },
    mode: "lines",
    hoverinfo: "skip",
    name: plain(series.label),
  };
}

function line(series, x, y, width) {
  return {
    x,
    y,
    mode: x.length > 1 ? "lines" : "markers",
    line: { color: inked(series.colour), width, dash: dashes(series) },
    marker: { color: inked(series.colour), size: 8 },
    name: plain(series.label),
    hoverinfo: "none", // the legend shows the losses under the pointer
  };
}

function meanLine(series, choice) {
  const x = abscissae(series, series.curve_seconds, choice);
  return line(series, x, series.curve[choice.loss].mean, 3);
}

/** Return the epoch or the seconds at which an event of plotly points. */
function pointedAt(event, choice) {
  return choice.x === "seconds" ? Math.max(0, event.xvals[0]) : event.points[0].x;
}

/** Return the spread of a series at an epoch, or after the last epoch within some seconds. */
function lossAt(series, choice, where) {
  const curve = series.curve[choice.loss];
  const at = choice.x === "seconds" ? series.curve_seconds.findLastIndex((each) => each !== null && each <= where) : where;
  return Object.fromEntries(Object.entries(curve).map(([name, values]) => [name, values[at] ?? null]));
}

function runLines(series, choice) {
  return series.runs.map((run) => {
    const x = choice.x === "seconds" ? run.seconds : run[choice.loss].map((_, epoch) => epoch);
    return line(series, x, run[choice.loss], 2);
  });
}

/** Mark the last epoch of a diverged run, at the upper edge if it is above the view. */
function crosses(series, choice, top) {
  const ended = series.runs.filter((run) => run.state === "diverged");
  const last = (run) => run[choice.loss].findLastIndex((value) => value !== null);
  const lasting = ended.filter((run) => last(run) >= 0);
  return {
    x: lasting.map((run) => (choice.x === "seconds" ? run.seconds[last(run)] : last(run))),
    y: lasting.map((run) => Math.min(run[choice.loss][last(run)], top)),
    mode: "markers",
    marker: { symbol: "x", size: 11, color: inked(series.colour) },
    name: plain(series.label),
    hoverinfo: "skip",
    cliponaxis: false,
  };
}

/** Return the lowest and highest loss to show: of the end of training, or of the whole run. */
function verticalRange(task, choice, hidden) {
  if (choice.range === "final") return task.view[choice.loss];
  const steady = task.series.filter((series, at) => series.state !== "diverged" && !hidden.has(at));
  const known = (name) => steady.flatMap((series) => series.curve[choice.loss][name])
    .filter((value) => value !== null);
  const low = known("low").reduce((a, b) => Math.min(a, b), Infinity);
  const high = known("high").reduce((a, b) => Math.max(a, b), -Infinity);
  if (low > high) return null;
  const margin = 0.03 * (high - low) || 1;
  return [low - margin, high + margin];
}

function axis(title, more) {
  return {
    title: { text: title, standoff: 12 },
    automargin: true, // else numbers of four digits overlap the title
    color: themed("--ink"),
    gridcolor: themed("--line"),
    linecolor: themed("--faint"),
    zeroline: false,
    ticks: "outside",
    tickcolor: themed("--line"),
    ...more,
  };
}

/** Return a few round numbers between two others, for a logarithmic axis. */
function logarithmicTicks(low, high) {
  const decades = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) decades.push(10 ** power);
  const within = (digits) => decades.flatMap((decade) => digits.map((digit) => digit * decade))
    .filter((value) => low <= value && value <= high);
  const sets = [[1], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 7]].map(within);
  const enough = sets.find((ticks) => ticks.length >= 4);
  if (enough) return enough;
  const step = 10 ** Math.floor(Math.log10(high - low)) / (Math.log10(high - low) % 1 < 0.5 ? 2 : 1);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, at) => (first + at) * step);
}

function vertical(choice, range) {
  const title = `${choice.loss} loss per image`;
  if (!range) return axis(title, { type: choice.y, autorange: true });
  if (choice.y === "linear" || range[1] <= 0) return axis(title, { type: "linear", range });
  const bounds = [Math.max(range[0], range[1] * 1e-4), range[1]];
  const ticks = logarithmicTicks(...bounds);
  const ticktext = ticks.map((value) => String(Number(value.toPrecision(4))));
  return axis(title, { type: "log", range: bounds.map(Math.log10), tickvals: ticks, ticktext });
}

function layout(task, choice, range, hidden) {
  const drawn = task.series.filter((_, at) => !hidden.has(at));
  const ends = drawn.map((series) => abscissae(series, series.curve_seconds, choice).at(-1));
  const end = Math.max(0, ...ends) || 1;
  return {
    xaxis: axis(choice.x === "seconds" ? "seconds of training" : "epoch", {
      range: [0, 1.01 * end],
      ...(choice.x !== "seconds" && end <= 8 ? { dtick: 1 } : {}), // no ticks at half epochs
      showspikes: true,
      spikemode: "across",
      spikesnap: choice.x === "seconds" ? "cursor" : "hovered data",
      spikethickness: 1,
      spikedash: "dot",
      spikecolor: themed("--soft"),
    }),
    yaxis: vertical(choice, range),
    font: { family: themed("--font"), size: 15, color: themed("--ink") },
    hovermode: "x",
    hoverdistance: -1,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: themed("--paper"), // of the edge of the line under the pointer too
    modebar: { bgcolor: "rgba(0,0,0,0)", color: themed("--faint"), activecolor: themed("--ink") },
    ...(matchMedia("print").matches ? PRINTED : { autosize: true }),
    showlegend: false,
    margin: { l: 68, r: 12, t: 12, b: 56 },
  };
}

/** Draw a task; `hidden` has the indices of the hidden series. */
function drawCurves(place, task, choice, hidden) {
  const range = verticalRange(task, choice, hidden);
  const traces = task.series.flatMap((series, at) => hidden.has(at) ? [] : [
    ...(choice.runs === "mean" && series.seeds.length > 1 ? [band(series, choice)] : []),
    ...(choice.runs === "mean" ? [meanLine(series, choice)] : runLines(series, choice)),
    ...(series.state === "diverged" ? [crosses(series, choice, range ? range[1] : Infinity)] : []),
  ].map((trace) => ({ ...trace, zorder: -at }))); // the best on top
  const options = {
    responsive: true,
    displaylogo: false,
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    toImageButtonOptions: { format: "svg", filename: "curves" },
  };
  return Plotly.react(place, traces, layout(task, choice, range, hidden), options);
}

/** Return the visible series that end above the upper edge. */
function aboveView(task, choice, hidden) {
  const range = verticalRange(task, choice, hidden);
  return task.series.filter((series, at) => {
    const last = series.curve[choice.loss].mean.findLast((value) => value !== null);
    const drawn = !hidden.has(at) && abscissae(series, series.curve_seconds, choice).at(-1) !== null;
    return range && drawn && last > range[1];
  });
}

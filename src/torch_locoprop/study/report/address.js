// The choices of the reader in the fragment of the address, so that a link or a reload keeps them.
"use strict";

/** Return the choices that are not as at first, as the text of a fragment. */
function fragment() {
  const kept = new URLSearchParams();
  if (task !== report.tasks[0]) kept.set("task", task.tab);
  for (const { key, options } of CHOICES) {
    if (choice[key] !== options[0][0]) kept.set(key, choice[key]);
  }
  const first = hiddenAtFirst(task);
  if (hidden.size !== first.size || [...hidden].some((at) => !first.has(at))) {
    for (const at of task.series.keys()) {
      if (hidden.has(at) !== first.has(at)) kept.append(hidden.has(at) ? "hide" : "show", task.series[at].label);
    }
  }
  const usual = firstView(task);
  if (view.sort !== usual.sort || view.direction !== usual.direction) {
    kept.set("sort", view.direction < 0 ? `-${view.sort}` : view.sort);
  }
  if (view.filter) kept.set("method", view.filter);
  if (!Object.is(view.level, usual.level)) kept.set("level", Number.isFinite(view.level) ? view.level : "");
  if (view.columns) kept.set("columns", "settings");
  return kept.toString();
}

/** Write the choices into the address, without a new entry in the history. */
function remember() {
  const text = fragment();
  if (text !== location.hash.slice(1)) history.replaceState(null, "", text ? `#${text}` : location.pathname);
}

/** Show what the address asks for; ignore what this page does not have. */
function recall() {
  const kept = new URLSearchParams(location.hash.slice(1));
  const wanted = report.tasks.find((each) => each.tab === kept.get("task")) ?? report.tasks[0];
  for (const { key, options } of CHOICES) {
    const known = options.map(([value]) => value);
    choice[key] = known.includes(kept.get(key)) ? kept.get(key) : known[0];
  }
  const switched = hiddenAtFirst(wanted);
  const indices = (name) => kept.getAll(name).map((label) => wanted.series.findIndex((each) => each.label === label));
  for (const at of indices("hide")) if (at >= 0) switched.add(at);
  for (const at of indices("show")) switched.delete(at);
  const options = firstView(wanted);
  const sort = kept.get("sort");
  if (sort) Object.assign(options, { sort: sort.replace(/^-/, ""), direction: sort.startsWith("-") ? -1 : 1 });
  options.filter = kept.get("method") ?? "";
  options.columns = kept.get("columns") === "settings" && wanted.varied.length > 0;
  if (kept.has("level")) options.level = kept.get("level") === "" ? NaN : Number(kept.get("level"));
  return show(wanted, { hidden: switched, view: options });
}

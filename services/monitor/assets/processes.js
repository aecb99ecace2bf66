// What each process spends its time on, the engines, and why groups were dropped.

import { byId, el, replace, setText } from "./dom.js";
import { count, milliseconds, number, percent } from "./format.js";

const FROM_GROUPS = "waits for rollouts and rewards";
const WAIT_COLORS = ["c2", "c5", "c4", "c6", "c1"];
const waits = [FROM_GROUPS]; // what was waited for so far: the same has one color in all rows

function colorOf(what) {
  if (!waits.includes(what)) waits.push(what);
  return WAIT_COLORS[waits.indexOf(what) % WAIT_COLORS.length];
}

/** Shows a bar for each process: working, what it waits for, and the rest. */
export function showProcesses(state, store) {
  const rows = [wholeRun(store)].filter(Boolean);
  for (const process of state.processes) {
    if (process.service !== "monitor" && process.time) rows.push(row(process.name, sharesOf(process), titleOf(process)));
  }
  replace(byId("processes"), rows.length ? rows : el("p", { class: "empty", text: "No process of the run is registered." }));
}

function titleOf(process) {
  return `pid ${process.pid} on ${process.host}, the last ${Math.round(process.time.window_s)} s`;
}

function sharesOf(process) {
  const { working, waits: shares } = process.time;
  const parts = working === null ? [] : [["working", working, "c3"]];
  for (const [what, share] of Object.entries(shares)) parts.push([what.replaceAll("group N", "a group"), share, colorOf(what)]);
  return parts;
}

/** The trainer's time over all steps, which metrics.jsonl knows to the second. */
function wholeRun(store) {
  const sums = ["train_s", "publish_s", "wait_s"].map((name) => (store.values(name) ?? []).reduce((sum, value) => sum + (value ?? 0), 0));
  const all = sums.reduce((a, b) => a + b, 0);
  if (!all) return null;
  const [train, publish, wait] = sums.map((sum) => sum / all);
  return row("trainer, all steps", [["training", train, "c3"], ["publishing", publish, "c1"], [FROM_GROUPS, wait, colorOf(FROM_GROUPS)]], "from metrics.jsonl");
}

function row(name, parts, title) {
  const shown = parts.filter(([, share]) => share >= 0.005);
  const words = shown.map(([what, share]) => `${what} ${percent(share)}`).join(", ");
  return el("div", { class: "row", title },
    el("span", { class: "name", text: name }),
    el("span", { class: "stack", role: "img", "aria-label": words || "nothing measured" },
      shown.map(([, share, color]) => el("i", { style: { width: `${100 * share}%`, background: `var(--${color})` } }))),
    el("span", { class: "words", text: words || "not measured" }));
}

const COLUMNS = [
  ["version", "Version", (engine, newest) => `${engine.version}${newest > engine.version ? ` (${newest - engine.version} behind)` : ""}`],
  ["busy", "Busy", (engine) => percent(engine.busy)],
  ["groups", "Groups", (engine) => number(engine.groups)],
  ["running", "Running", (engine) => number(engine.running)],
  ["kv_use", "KV cache", (engine) => percent(engine.kv_use)],
  ["pause_ms", "Last pause", (engine) => milliseconds(engine.pause_ms)],
];

/** Shows a row for each engine; of what was never measured there is no column. */
export function showEngines(state, served) {
  const engines = state.engines.length ? state.engines : served.map((item) => ({ name: item.engine.replace(/\.[^.]*$/, ""), kind: "", version: item.served.at(-1)[0] }));
  const columns = COLUMNS.filter(([name]) => engines.some((engine) => engine[name] !== null && engine[name] !== undefined));
  replace(byId("engines"), engines.length
    ? el("table", {},
      el("thead", {}, el("tr", {}, ["Engine", ...columns.map(([, label]) => label)].map((label) => el("th", { scope: "col", text: label })))),
      el("tbody", {}, engines.map((engine) => el("tr", {},
        el("th", { scope: "row" }, engine.name, engine.kind ? el("small", { text: ` ${engine.kind}` }) : null),
        columns.map(([name, , show]) => el("td", { "data-column": name, text: show(engine, state.version) }))))))
    : el("p", { class: "empty", text: "No engine has served a version yet." }));
}

/** Shows how many groups were dropped for which reason. */
export function showDrops(state) {
  const reasons = Object.entries(state.dropped_by_reason).sort((a, b) => b[1] - a[1]);
  const wasted = state.wasted_by_reason ?? {};
  const most = Math.max(1, ...reasons.map(([, groups]) => groups));
  setText(byId("drops-note"), state.drops_since_event > 0 ? `In the part of the event log that was read, from event ${state.drops_since_event} on.` : "Since the run began.");
  replace(byId("drops"), reasons.length
    ? reasons.map(([reason, groups]) => el("div", { class: "row", "data-reason": reason, "data-value": groups },
      el("span", { class: "name", text: reason }),
      el("span", { class: "stack" }, el("i", { style: { width: `${(100 * groups) / most}%`, background: "var(--c5)" } })),
      el("span", { class: "words", text: count(groups, "group") + (wasted[reason] ? `, ${count(wasted[reason], "token")}` : "") })))
    : el("p", { class: "empty", text: "No group was dropped." }));
}

// The head of the page and its tiles: what state the run is in, and the newest numbers.

import { byId, el, replace, setText } from "./dom.js";
import { count, number, percent, seconds } from "./format.js";

const STATES = [
  [/^halted/, "bad"], [/^running/, "live"], [/^draining/, "warn"], [/^done/, "good"], [/./, "idle"],
];

/** Shows the run's name, state, progress and bound. */
export function showState(state) {
  setText(byId("run"), state.run ?? "run");
  document.title = `${state.run} · ${state.version}/${state.steps} · tether`;
  const [word] = state.run_state.split(":");
  const pill = byId("state");
  setText(pill, word);
  pill.className = `pill ${STATES.find(([pattern]) => pattern.test(word))[1]}`;
  setText(byId("version"), [`version ${state.version.toLocaleString("en-US")} of ${state.steps.toLocaleString("en-US")}`, state.rate].filter(Boolean).join(" · "));
  byId("bottleneck").hidden = !state.bottleneck;
  setText(byId("bottleneck"), state.bottleneck ?? "");
  byId("compared").hidden = !state.compared;
  if (state.compared && !byId("compared").children.length) {
    replace(byId("compared"), state.compared.map((name, i) => el("li", {}, el("i", { class: `swatch ${i ? "dashed" : ""}`, style: { "--swatch": "var(--ink)" } }), el("b", { text: name }))));
  }
  byId("progress").style.setProperty("width", `${Math.min(100, (100 * state.version) / Math.max(1, state.steps))}%`);
  const notice = byId("notice");
  notice.hidden = !state.run_state.startsWith("halted");
  setText(notice, notice.hidden ? "" : `Leasing has stopped: ${state.run_state.slice(8)}. Mend the cause, then run: tether drain D --off`);
  setText(byId("facts"), facts(state));
}

function facts(state) {
  const bound = state.bound, pending = state.pending_bound;
  return [
    `bound: max_staleness ${bound.max_staleness}, ${count(bound.groups_per_step, "group")} per step, policy ${bound.policy}`,
    pending ? `pending: max_staleness ${pending.max_staleness}, ${count(pending.groups_per_step, "group")}, ${pending.policy}` : "",
    state.epoch ? `epoch ${state.epoch}` : "",
    state.issued !== null && state.issued !== undefined ? `groups: ${state.issued} issued, ${state.trained} trained, ${state.dropped} dropped, ${state.active} active` : "",
    state.source === "files" ? "shown from the run directory" : "",
  ].filter(Boolean).join("  ·  ");
}

/** Shows the newest numbers of the run, or those of all its steps once it is over. */
export function showTiles(store, state, isOver) {
  const last = isOver ? wholeRun(store) : store.last;
  const has = Object.keys(store.last).length > 0;
  const total = last.step_s;
  const tiles = [
    { id: "reward_mean", label: isOver ? "Last reward" : "Reward", value: has ? store.last.reward_mean : null, note: change(store, "reward_mean") },
    { id: "lag_mean", label: "Mean lag", value: has ? last.lag_mean : null, note: has ? `largest ${number(last.lag_max)}${state ? `, bound ${state.bound.max_staleness}` : ""}` : "" },
    { id: "tokens_per_s", label: "Trained tokens/s", value: total > 0 ? last.trained_tokens / total : null, note: has ? `${count(last.trained_tokens, "token")} in ${seconds(total)}` : "" },
    { id: "wait_share", label: "Trainer waits", value: total > 0 ? last.wait_s / total : null, format: percent, note: has ? `${seconds(last.wait_s)} of ${isOver ? seconds(total) : "the last step"}` : "" },
    engines(state, store, isOver),
    { id: "dropped", label: "Groups dropped", value: state?.dropped ?? null, note: state?.issued ? `${percent(state.dropped / state.issued)} of ${state.issued.toLocaleString("en-US")}` : "" },
  ];
  if (store.skipped) {
    tiles.push({ id: "skipped", label: "Steps skipped", value: store.skipped, note: store.last.skipped ? `the last one: ${store.last.skipped}` : "they changed no weights" });
  }
  const parent = byId("tiles");
  if (parent.children.length !== tiles.length) {
    replace(parent, tiles.map((tile) => el("div", { class: "tile", "data-tile": tile.id }, el("span", { text: tile.label }), el("b", { text: "–" }), el("small", { text: "\u00a0" }))));
  }
  tiles.forEach((tile, i) => {
    const [label, value, note] = parent.children[i].children;
    parent.children[i].dataset.value = tile.value === null || tile.value === undefined ? "" : String(tile.value);
    setText(label, tile.label);
    setText(value, (tile.format ?? number)(tile.value));
    setText(note, tile.note || "\u00a0");
  });
}

/** Returns the sums and means over all steps under the names that a step's line has. */
function wholeRun(store) {
  const steps = store.stepCounts();
  const sum = (name) => (store.values(name) ?? []).reduce((all, value, i) => all + (value ?? 0) * steps[i], 0);
  const tokens = store.lags.flat().reduce((all, [, count]) => all + count, 0);
  const known = (store.values("lag_max") ?? []).filter((value) => value !== null);
  return {
    step_s: sum("step_s"), wait_s: sum("wait_s"), trained_tokens: sum("trained_tokens"),
    lag_mean: tokens ? store.lags.flat().reduce((all, [lag, count]) => all + lag * count, 0) / tokens : null,
    lag_max: known.length ? known.reduce((a, b) => Math.max(a, b)) : null,
  };
}

function engines(state, store, isOver) {
  const known = (state?.engines ?? []).map((engine) => engine.busy).filter((busy) => busy !== null && busy !== undefined);
  if (known.length) return { id: "busy", label: "Engines busy", value: known.reduce((a, b) => a + b, 0) / known.length, format: percent, note: count(state.engines.length, "engine") };
  const recent = (store.values("engine_busy") ?? []).filter((value) => value !== null).slice(isOver ? 0 : -20);
  return { id: "busy", label: "Engines busy", value: recent.length ? recent.reduce((a, b) => a + b, 0) / recent.length : null, format: percent, note: isOver ? "mean of the run" : `mean of the last ${count(recent.length * store.width, "step")}` };
}

/** Compares the last tenth of the run with the tenth before it. */
function change(store, name) {
  const values = (store.values(name) ?? []).filter((value) => value !== null);
  const part = Math.max(1, Math.floor(values.length / 10));
  if (values.length < 2 * part) return "";
  const mean = (from, to) => values.slice(from, to).reduce((a, b) => a + b, 0) / part;
  const difference = mean(values.length - part, values.length) - mean(values.length - 2 * part, values.length - part);
  return `${difference < 0 ? "−" : "+"}${number(Math.abs(difference))} over ${count(part * store.width, "step")}`;
}

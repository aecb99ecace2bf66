// What all charts are drawn over: steps, the time since the run's first step, or the tokens that it has trained.

import { byId, segments, setText } from "./dom.js";
import { number, seconds } from "./format.js";

/** Distances of marks that are whole numbers. */
export const WHOLE = [1, 2, 5].flatMap((digit) => [...Array(16).keys()].map((power) => digit * 10 ** power)).sort((a, b) => a - b);
const TIMES = [0.01, 0.1, 1, 2, 5, 10, 15, 30, ...[1, 2, 5, 10, 15, 30].map((n) => n * 60), ...[1, 2, 4, 6, 12, ...WHOLE.map((n) => 24 * n)].map((n) => n * 3600)];

const AXES = {
  step: { label: "Steps", words: "steps", marks: WHOLE, format: number, places: (store) => store.columns.step },
  time: { label: "Time", words: "time", marks: TIMES, format: seconds, places: elapsed },
  tokens: { label: "Tokens", words: "trained tokens", marks: WHOLE, format: number, places: tokens },
};
let chosen = "step";

/** Shows the choices; `onChange` is called when one was made. */
export function startAxis(parent, onChange) {
  segments(parent, Object.entries(AXES).map(([name, axis]) => [name, axis.label]), (name) => name === chosen, (name) => {
    chosen = name;
    setText(byId("over"), AXES[name].words);
    onChange();
  });
}

/** Returns the axis that is chosen: words and format, and the distances that its marks may have. */
export const axis = () => AXES[chosen];

/** Returns where each point of a store is on the axis, never left of the one before. */
export const placesOf = (store) => store.places ?? axis().places(store);

/** Seconds since the first step; a file without times is drawn over steps. */
function elapsed(store) {
  const times = store.values("time");
  if (!store.has("time")) return store.columns.step;
  let last = times.find((time) => time !== null);
  const first = last;
  return times.map((time) => (last = Math.max(last, time ?? last)) - first);
}

function tokens(store) {
  const each = store.values("trained_tokens") ?? [];
  if (!store.has("trained_tokens")) return store.columns.step;
  let sum = 0;
  return store.stepCounts().map((steps, i) => (sum += steps * (each[i] ?? 0)));
}

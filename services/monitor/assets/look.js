// How all charts are drawn: the scale of their values, and how far they are smoothed.

import { segments } from "./dom.js";

const SCALES = [["linear", "Linear"], ["log", "Log"]];
const SMOOTHINGS = [["off", "Raw"], ["auto", "Smooth"], ["strong", "Smoother"]];
const FROM = { off: Infinity, auto: 150, strong: 10 }; // points from which a moving mean is drawn
const PARTS = { off: 1, auto: 40, strong: 10 }; // the mean is over this part of the points
const chosen = { scale: "linear", smoothing: "auto" };

/** Shows the choices; `onChange` is called when one was made. */
export function startLook(scale, smoothing, onChange) {
  for (const [parent, choices, name] of [[scale, SCALES, "scale"], [smoothing, SMOOTHINGS, "smoothing"]]) {
    segments(parent, choices, (value) => chosen[name] === value, (value) => { chosen[name] = value; onChange(); });
  }
}

/** Returns whether values of these columns are drawn on a logarithmic axis: those below 0 have none. */
export function isLogarithmic(columns) {
  const known = columns.flat().filter((value) => value !== null);
  return chosen.scale === "log" && known.every((value) => value >= 0) && known.some((value) => value > 0);
}

/** Returns whether charts of so many points get a moving mean; spiky ones, of which single points matter, less often. */
export const isSmoothed = (points, isSpiky) => points >= FROM[chosen.smoothing] && !(isSpiky && chosen.smoothing === "auto");

/** Returns the mean of the values around each point. */
export function movingMean(column) {
  const reach = Math.ceil(column.length / PARTS[chosen.smoothing] / 2);
  const sums = [0], counts = [0];
  for (const value of column) {
    sums.push(sums.at(-1) + (value ?? 0));
    counts.push(counts.at(-1) + (value === null ? 0 : 1));
  }
  return column.map((value, i) => {
    const [from, to] = [Math.max(0, i - reach), Math.min(column.length, i + reach + 1)];
    return value === null ? null : (sums[to] - sums[from]) / (counts[to] - counts[from]);
  });
}

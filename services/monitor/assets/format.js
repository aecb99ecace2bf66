// Writes numbers, durations and times for people.

const MISSING = "–";

/** Returns a number with about four significant digits: 0.4766, 12.35, 1,180, 2.4 M. */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return MISSING;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return `${(value / 1e9).toPrecision(3)} G`;
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size < 1e-4) return value.toExponential(2).replace("e-", "e−").replace(/^-/, "−");
  const digits = Number.isInteger(value) ? 0 : Math.max(0, 3 - Math.floor(Math.log10(size)));
  return value.toFixed(Math.min(digits, 6)).replace(/^-/, "−");
}

/** Returns a share from 0 to 1 in percent. */
export function percent(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return MISSING;
  const shown = value * 100;
  return `${shown > 0 && shown < 10 ? shown.toFixed(1) : Math.round(shown)} %`;
}

/** Returns seconds in the unit that fits. */
export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return MISSING;
  if (value === 0) return "0 s";
  if (value < 0.1) return `${short(value * 1000)} ms`;
  if (value < 120) return `${short(value)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (value < 172800) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d ${Math.floor((value % 86400) / 3600)} h`;
}

const short = (value) => (value < 100 ? `${+value.toPrecision(3)}` : `${Math.round(value)}`);

/** Returns milliseconds in the unit that fits. */
export const milliseconds = (value) => seconds(value === null || value === undefined ? value : value / 1000);

const scaleOfSeconds = (largest) => (largest < 0.1 ? [1000, " ms"] : largest < 120 ? [1, " s"] : largest < 7200 ? [1 / 60, " min"] : [1 / 3600, " h"]);
const SCALES = new Map([
  [percent, () => [100, " %"]],
  [seconds, scaleOfSeconds],
  [milliseconds, (largest) => { const [factor, unit] = scaleOfSeconds(largest / 1000); return [factor / 1000, unit]; }],
]);

function scaleOfNumbers(largest) {
  if (largest >= 1e4) return largest >= 1e6 ? [1e-6, " M"] : [1e-3, " k"];
  const power = Math.floor(Math.log10(largest));
  return power < -3 ? [10 ** -power, `e−${-power}`] : [1, ""];
}

/** Returns the labels of an axis: all in one unit, with as many digits as tell each tick from the others. */
export function axisLabels(ticks, format) {
  const largest = Math.max(...ticks.map(Math.abs));
  if (!(largest > 0)) return ticks.map(() => "0");
  const [factor, unit] = (SCALES.get(format) ?? scaleOfNumbers)(largest);
  const values = ticks.map((tick) => tick * factor);
  const isExact = (digits) => values.every((value) => Math.abs(Number(value.toFixed(digits)) - value) < 1e-6 * largest * factor);
  const digits = [0, 1, 2, 3, 4, 5, 6, 7, 8].find(isExact) ?? 8;
  return values.map((value) => (value === 0 ? "0" : `${value.toFixed(digits)}${unit}`.replace(/^-/, "−")));
}

/** Returns the local times of day of Unix times in milliseconds, exact enough to differ. */
export function clocks(times) {
  const labels = times.map(clock);
  if (new Set(labels).size === times.length) return labels;
  return times.map((ms, i) => `${labels[i]}.${String(Math.floor(ms) % 1000).padStart(3, "0")}`);
}

/** Returns the local time of day of a Unix time in milliseconds. */
export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

/** Returns the local date and time of a Unix time in milliseconds. */
export const moment = (ms) => `${new Date(ms).toLocaleDateString("en-CA")} ${clock(ms)}`;

/** Returns a number with its noun: "1 group", "3 groups". */
export const count = (value, noun) => `${Number(value).toLocaleString("en-US")} ${noun}${value === 1 ? "" : "s"}`;

/** Returns bytes in the unit that fits. */
export const bytes = (value) => (value < 1000 ? `${value} B` : value < 1e6 ? `${Math.round(value / 1000)} kB` : `${(value / 1e6).toFixed(1)} MB`);

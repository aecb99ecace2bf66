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

/** Returns the local time of day of a Unix time in milliseconds. */
export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

/** Returns the local date and time of a Unix time in milliseconds. */
export const moment = (ms) => `${new Date(ms).toLocaleDateString("en-CA")} ${clock(ms)}`;

/** Returns a number with its noun: "1 group", "3 groups". */
export const count = (value, noun) => `${Number(value).toLocaleString("en-US")} ${noun}${value === 1 ? "" : "s"}`;

/** Returns bytes in the unit that fits. */
export const bytes = (value) => (value < 1000 ? `${value} B` : value < 1e6 ? `${Math.round(value / 1000)} kB` : `${(value / 1e6).toFixed(1)} MB`);

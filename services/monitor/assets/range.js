// The steps that all charts show: all of them, the newest ones, or those that the reader has dragged over.

import { segments } from "./dom.js";

const CHOICES = [["all", "All steps"], ["500", "Last 500"], ["100", "Last 100"]];
let chosen = "all";
let zoom = null;
let announce = () => {};
let mark = () => {};

/** Shows the choices; `onChange` is called when the range has changed. */
export function startRange(parent, onChange) {
  announce = () => { mark(); onChange(); };
  mark = segments(parent, CHOICES, (value) => zoom === null && value === chosen, (value) => {
    chosen = value;
    zoom = null;
    announce();
  });
}

/** Shows the steps from `min` to `max` in all charts, until another choice is made. */
export function zoomTo(min, max) {
  zoom = [min, max];
  announce();
}

/** Returns the first and last step to show. */
export function shownRange(store) {
  const steps = store.columns.step;
  const last = steps.at(-1) ?? 0;
  if (zoom) return zoom;
  return [chosen === "all" ? steps[0] ?? 0 : Math.max(steps[0] ?? 0, last - Number(chosen)), last];
}

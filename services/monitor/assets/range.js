// The steps that all charts show: all of them, the newest ones, or those that the reader has dragged over.

import { placesOf } from "./axis.js";
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

/** Shows the part of the axis from `min` to `max` in all charts, until another choice is made. */
export function zoomTo(min, max) {
  zoom = [min, max];
  announce();
}

/** Forgets what was dragged over: places on another axis. */
export function forgetZoom() {
  zoom = null;
  mark();
}

/** Returns the first and last place of the axis to show. */
export function shownRange(store) {
  if (zoom) return zoom;
  const places = placesOf(store), steps = store.columns.step;
  const first = chosen === "all" ? 0 : steps.findIndex((step) => step >= steps.at(-1) - Number(chosen));
  return [places[first] ?? 0, places.at(-1) ?? 0];
}

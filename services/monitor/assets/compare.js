// Lays a second run over the first one: its values become columns `other.NAME` at the same steps.

import { Store } from "./store.js";

/** Stands before the names of the second run's columns. */
export const OTHER = "other.";

/** Returns a store with the points of both runs, by step; what is not a column is the first run's. */
export function laidOver(store, other) {
  const both = Object.assign(new Store(), store);
  const starts = [...new Set([...store.columns.start, ...other.columns.start])].sort((a, b) => a - b);
  const column = (source, name) => {
    const values = new Map(source.columns.start.map((start, i) => [start, source.columns[name][i]]));
    return starts.map((start) => values.get(start) ?? null);
  };
  both.columns = {};
  for (const name of Object.keys(store.columns)) both.columns[name] = column(store, name);
  for (const name of Object.keys(other.columns)) both.columns[OTHER + name] = column(other, name);
  both.columns.start = starts;
  both.columns.step = both.columns.step.map((step, i) => step ?? both.columns[`${OTHER}step`][i]);
  const lags = new Map(store.columns.start.map((start, i) => [start, store.lags[i]]));
  both.lags = starts.map((start) => lags.get(start) ?? []);
  return both;
}

/** Returns the series of the second run for one of the first's, if it has values: dashed, in the same color. */
export function otherOf(item, store) {
  const names = (item.from ?? [item.name]).map((name) => OTHER + name);
  if (!names.every((name) => store.has(name))) return [];
  const source = item.from ? { from: names } : { name: names[0] };
  return [{ ...item, ...source, id: OTHER + (item.id ?? item.name), band: null, isOther: true }];
}

// Lays a second run over the first one: its values become columns `other.NAME` at the same places of the axis.

import { placesOf } from "./axis.js";
import { Store } from "./store.js";

/** Stands before the names of the second run's columns. */
export const OTHER = "other.";

/** Returns a store with the points of both runs, by place; what is not a column is the first run's. */
export function laidOver(store, other) {
  const both = Object.assign(new Store(), store);
  const [own, others] = [placesOf(store), placesOf(other)];
  const places = [...new Set([...own, ...others])].sort((a, b) => a - b);
  const placed = (from, values, missing) => {
    const known = new Map(from.map((place, i) => [place, values[i]]));
    return places.map((place) => known.get(place) ?? missing);
  };
  both.columns = {};
  for (const [name, values] of Object.entries(store.columns)) both.columns[name] = placed(own, values, null);
  for (const [name, values] of Object.entries(other.columns)) both.columns[OTHER + name] = placed(others, values, null);
  for (const name of ["start", "step"]) both.columns[name] = both.columns[name].map((value, i) => value ?? both.columns[OTHER + name][i]);
  both.lags = placed(own, store.lags, []);
  both.places = places;
  return both;
}

/** Returns the series of the second run for one of the first's, if it has values: dashed, in the same color. */
export function otherOf(item, store) {
  const names = (item.from ?? [item.name]).map((name) => OTHER + name);
  if (!names.every((name) => store.has(name))) return [];
  const source = item.from ? { from: names } : { name: names[0] };
  return [{ ...item, ...source, id: OTHER + (item.id ?? item.name), band: null, isOther: true }];
}

// The lag panel's cells: how many tokens of each lag a step trained, against the bound.

import { placesOf } from "./axis.js";
import { color } from "./theme.js";

/** Returns what the lag panel draws beside its lines: the bound as values and as a line above its row of cells,
 *  and the largest lag that there is room for. */
export function lagColumns(store, columns) {
  const bound = store.boundColumn();
  const seen = store.lags.flat().map(([lag]) => lag);
  const largest = Math.max(1, ...bound.map((value) => value ?? 0), ...columns.flat().map((value) => value ?? 0), ...seen);
  return { bound, line: bound.map((value) => (value === null ? null : value + 0.5)), largest };
}

/** Draws a cell for each point and lag, under the lines of the plot. */
export function drawCells(plot, store, largest) {
  const { ctx, bbox } = plot;
  const places = placesOf(store);
  const height = Math.abs(plot.valToPos(0, "y", true) - plot.valToPos(1, "y", true));
  const center = places.map((place) => plot.valToPos(place, "x", true));
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.fillStyle = color("c1");
  store.lags.forEach((rows, i) => {
    const total = rows.reduce((sum, [, tokens]) => sum + tokens, 0);
    const half = Math.max(0.5, (i + 1 < places.length ? center[i + 1] - center[i] : i ? center[i] - center[i - 1] : 20) / 2);
    if (total === 0 || center[i] + half < bbox.left || center[i] - half > bbox.left + bbox.width) return;
    for (const [lag, tokens] of rows) {
      if (lag > largest || tokens === 0) continue;
      ctx.globalAlpha = 0.08 + 0.62 * (tokens / total);
      const left = Math.round(center[i] - half);
      ctx.fillRect(left, plot.valToPos(lag + 0.5, "y", true), Math.max(1, Math.round(center[i] + half) - left), height - 1);
    }
  });
  ctx.restore();
}

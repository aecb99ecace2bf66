// The scores of held-out sets, as points of the steps that made the scored versions.

import { ask } from "./api.js";

const SCORES = ["greedy", "sampled"];

let rows = [];
let last = 0;

/** Asks for what was scored since; returns whether there is anything new. */
export async function pollEvaluations() {
  const answer = await ask("evaluations.json", { after: last });
  if (answer.reset) rows = [];
  rows.push(...answer.rows);
  last = answer.last;
  return answer.reset || answer.rows.length > 0;
}

/** Puts the scores into the store, as columns such as `eval_math_greedy`; the later score of a point counts. */
export function addEvaluations(store) {
  const starts = store.columns.start;
  for (const name of Object.keys(store.columns)) if (store.evaluated.has(name)) store.columns[name].fill(null);
  if (!starts.length) return;
  for (const row of rows) {
    let at = starts.length - 1;
    while (at > 0 && starts[at] > row.step) at -= 1;
    for (const score of SCORES) {
      if (row[score] === undefined) continue;
      const name = `eval_${row.set}_${score}`;
      store.evaluated.add(name);
      store.columns[name] ??= Array(starts.length).fill(null);
      store.columns[name][at] = row[score];
    }
  }
}

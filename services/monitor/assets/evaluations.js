// The scores of held-out sets, as points of the steps that made the scored versions.

import { ask } from "./api.js";

const SCORES = ["greedy", "sampled"];

/** The scores of one run. */
export class Evaluations {
  /** `folder` is where the monitor has the run's answers: empty for the first one. */
  constructor(folder) {
    this.path = `${folder}evaluations.json`;
    this.rows = [];
    this.last = 0;
  }

  /** Asks for what was scored since; returns whether there is anything new. */
  async poll() {
    const answer = await ask(this.path, { after: this.last });
    if (answer.reset) this.rows = [];
    this.rows.push(...answer.rows);
    this.last = answer.last;
    return answer.reset || answer.rows.length > 0;
  }

  /** Puts the scores into the store, as columns such as `eval_math_greedy`; the later score of a point counts. */
  addTo(store) {
    const starts = store.columns.start;
    for (const name of Object.keys(store.columns)) if (store.evaluated.has(name)) store.columns[name].fill(null);
    if (!starts.length) return;
    for (const row of this.rows) {
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
}

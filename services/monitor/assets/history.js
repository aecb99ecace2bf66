// The history of one run, as the monitor tells it: numbers of steps, and scores of held-out sets.

import { ask } from "./api.js";
import { Evaluations } from "./evaluations.js";
import { Store } from "./store.js";

/** The store of one run, and what keeps it up to date. */
export class History {
  /** `folder` is where the monitor has the run's answers: empty for the first one. */
  constructor(folder = "") {
    this.path = `${folder}steps.json`;
    this.store = new Store();
    this.scores = new Evaluations(folder);
  }

  /** Asks for steps, and for scores if `isSlow` and at first; returns whether there is anything new. */
  async poll(isSlow) {
    const answers = await Promise.all([this.pollSteps(), (isSlow || !this.store.revision) && this.scores.poll()]);
    if (answers.some(Boolean)) this.scores.addTo(this.store);
    return answers.some(Boolean);
  }

  async pollSteps() {
    const changed = this.store.merge(await ask(this.path, { after: this.store.revision }));
    return changed ?? this.store.merge(await ask(this.path, { after: 0 }));
  }
}

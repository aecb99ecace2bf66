// Keeps the history of the run as columns, and merges what the monitor sends of it.

/** The points of a run: `columns[name][i]` is the value of a field at point i, null where there is none. */
export class Store {
  constructor() {
    this.clear();
  }

  clear() {
    this.id = "";
    this.revision = 0;
    this.width = 1;
    this.columns = { start: [], step: [] };
    this.evaluated = new Set(); // names of the columns that evaluations.js has made
    this.lags = [];
    this.bounds = [];
    this.last = {};
    this.skipped = 0;
    this.complete = false;
  }

  get length() {
    return this.columns.start.length;
  }

  /** Takes an answer of /steps.json; returns whether it changed anything, or null if all has to be asked again. */
  merge(answer) {
    if (answer.id !== this.id && !answer.reset) {
      this.clear();
      return null;
    }
    const changed = answer.reset || answer.columns.start.length > 0 || answer.complete !== this.complete;
    if (answer.reset) this.replaceAll(answer);
    else this.mergePoints(answer);
    this.id = answer.id;
    this.revision = answer.revision;
    this.width = answer.width;
    this.bounds = answer.bounds;
    this.last = answer.last;
    this.skipped = answer.skipped;
    this.complete = answer.complete;
    return changed;
  }

  /** Returns the values of a field, or null if no point has it. */
  values(name) {
    return this.columns[name] ?? null;
  }

  /** Returns whether a field was ever measured. */
  has(name) {
    return this.columns[name]?.some((value) => value !== null) ?? false;
  }

  /** Returns how many steps each point stands for. */
  stepCounts() {
    return this.columns.start.map((start) => Math.max(0, Math.min(this.width, this.last.step - start + 1)));
  }

  /** Returns a column computed from others, point by point; null where one of them is missing. */
  derive(names, compute) {
    const inputs = names.map((name) => this.columns[name]);
    if (inputs.some((column) => !column)) return null;
    return this.columns.start.map((_, i) => {
      const row = inputs.map((column) => column[i]);
      return row.some((value) => value === null) ? null : compute(...row);
    });
  }

  /** Returns the bound (max_staleness) at each point; null where it is not known. */
  boundColumn() {
    return this.columns.step.map((step) => {
      let bound = null;
      for (const [version, maxStaleness] of this.bounds) if (version <= step) bound = maxStaleness;
      return bound;
    });
  }

  replaceAll(answer) {
    this.columns = answer.columns;
    this.lags = answer.lags;
  }

  mergePoints(answer) {
    const starts = this.columns.start;
    for (const name of Object.keys(answer.columns)) this.columns[name] ??= Array(starts.length).fill(null);
    answer.columns.start.forEach((start, row) => {
      let at = starts.length;
      while (at > 0 && starts[at - 1] >= start) at -= 1;
      const replaces = starts[at] === start;
      for (const [name, column] of Object.entries(this.columns)) {
        column.splice(at, replaces ? 1 : 0, answer.columns[name]?.[row] ?? null);
      }
      this.lags.splice(at, replaces ? 1 : 0, answer.lags[row]);
    });
  }
}

// One chart: a panel with a legend that shows the values at the cursor, and a uPlot below it.

import { axis as chosenAxis, placesOf, WHOLE } from "./axis.js";
import { el, replace, setText } from "./dom.js";
import { axisLabels, number } from "./format.js";
import { drawCells, lagColumns } from "./lag.js";
import { isLogarithmic, isSmoothed, movingMean } from "./look.js";
import { color } from "./theme.js";
import { shownRange, zoomTo } from "./range.js";

const HEIGHT = 190;
const FONT = "11px system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

/** A chart of one panel of the table in panels.js. */
export class Chart {
  constructor(panel, parent) {
    this.panel = panel;
    this.format = panel.format ?? number;
    this.at = el("span", { class: "at" });
    this.legend = el("ul", { class: "legend" });
    this.box = el("div", { class: "plot", role: "img" });
    this.element = el("article", { class: `panel chart${panel.wide ? " wide" : ""}`, "data-panel": panel.id },
      el("div", { class: "panel-head" }, el("h3", { text: panel.title }), this.at, el("p", { text: panel.help ?? "" })),
      this.legend, this.box);
    parent.append(this.element);
    this.series = [];
    this.plot = null;
    this.cursor = null;
    this.resize = new ResizeObserver(() => this.fit());
    this.resize.observe(this.box);
  }

  /** Draws the series; the plot is only made anew when they are others than before. */
  update(store, series) {
    this.store = store;
    this.series = series;
    this.columns = series.map((item) => (item.from ? store.derive(item.from, item.compute) : store.values(item.name)));
    this.isLog = !this.panel.stack && !this.panel.lag && isLogarithmic(this.columns);
    this.element.dataset.scale = this.isLog ? "log" : "linear";
    const ids = `${series.map((item) => item.id)} ${this.smoothed()} ${this.bands()} ${this.isLog} ${chosenAxis().words}`;
    const isNew = ids !== this.ids || !this.plot;
    this.ids = ids;
    if (this.panel.lag) this.extra = lagColumns(store, this.columns);
    const data = this.data();
    if (isNew) this.rebuild(data);
    else this.setData(data);
    this.showValues();
    this.describe();
  }

  /** Makes the plot anew, in the colors of the theme. */
  rebuild(data = this.data()) {
    this.plot?.destroy();
    this.makeLegend();
    this.plot = new uPlot(this.options(), data, this.box);
  }

  /** Shows the steps that are chosen for all charts. */
  setRange() {
    if (!this.plot || !this.store.length) return;
    const [min, max] = shownRange(this.store);
    this.plot.setScale("x", { min, max });
  }

  setData(data) {
    this.plot.setData(data, false);
    this.setRange();
  }

  /** uPlot's data: places on the axis, then a column for each line; bands and stacks need further ones. */
  data() {
    const x = placesOf(this.store);
    if (this.panel.stack) return [x, ...stacked(this.columns)];
    const bands = this.bands().flatMap(([i, name]) => edges(this.columns[i], this.store.values(name)));
    const smooth = this.smoothed().map((i) => movingMean(this.columns[i]));
    const lines = [...this.columns, ...(this.extra ? [this.extra.line] : []), ...bands, ...smooth];
    return [x, ...(this.isLog ? lines.map((column) => column.map((value) => (value > 0 ? value : null))) : lines)];
  }

  /** Series that get a moving mean over faint values: a thousand noisy steps hide where a run is going. */
  smoothed() {
    if (this.panel.stack || this.panel.lag || !isSmoothed(this.store.length, this.panel.raw)) return [];
    return this.series.flatMap((item, i) => (item.points ? [] : [i]));
  }

  bands() {
    return this.series.flatMap((item, i) => (item.band && this.store.has(item.band) ? [[i, item.band]] : []));
  }

  options() {
    const ink = color("axis"), grid = color("grid");
    const axis = { stroke: ink, font: FONT, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    const smooth = this.smoothed();
    const hidden = { stroke: "transparent", points: { show: false } };
    const lines = this.series.map((item, i) => this.line(item, smooth.includes(i)));
    const extra = this.extra ? [{ stroke: color("bound"), width: 1.5, dash: [6, 4], paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } }] : [];
    const bands = this.bands();
    const first = lines.length + extra.length + 1;
    return {
      width: Math.max(this.box.clientWidth, 120), height: HEIGHT, padding: [8, 10, 0, 0], legend: { show: false },
      cursor: { sync: { key: "steps", setSeries: false }, drag: { x: true, y: false, setScale: false }, points: { size: 7 }, y: false },
      scales: { x: { time: false, range: (_, min, max) => (min === max ? [min - 1, max + 1] : [min, max]) }, y: { distr: this.isLog ? 3 : 1, range: (_, min, max) => this.yRange(min, max) } },
      axes: [
        { ...axis, size: 26, gap: 4, space: 60, incrs: chosenAxis().marks, values: (_, ticks) => axisLabels(ticks, chosenAxis().format) },
        { ...axis, size: 54, gap: 6, space: 32, values: (_, ticks) => this.ticks(ticks), ...(this.extra ? { incrs: WHOLE } : {}) },
      ],
      series: [{}, ...lines, ...extra, ...bands.flatMap(() => [hidden, hidden]), ...smooth.map((i) => ({ stroke: color(this.series[i].color), width: 1.75, dash: dashOf(this.series[i]), spanGaps: true, points: { show: false } }))],
      bands: this.panel.stack
        ? this.series.slice(1).map((item, i) => ({ series: [i + 2, i + 1], fill: faded(item.color, 0.55) }))
        : bands.map(([i], k) => ({ series: [first + 2 * k, first + 2 * k + 1], fill: faded(this.series[i].color, 0.16) })),
      hooks: {
        setCursor: [(plot) => { this.cursor = plot.cursor.idx ?? null; this.showValues(); }],
        setSelect: [(plot) => this.zoom(plot)],
        drawAxes: this.extra ? [(plot) => drawCells(plot, this.store, this.extra.largest)] : [],
      },
    };
  }

  line(item, isFaint) {
    const stroke = isFaint ? faded(item.color, 0.38) : color(item.color);
    const isSparse = item.points;
    return {
      stroke: item.hiddenLine ? "transparent" : stroke, width: this.panel.stack || isFaint ? 1 : 1.75, dash: dashOf(item),
      spanGaps: Boolean(isSparse) || this.series.some((shown) => shown.isOther),
      points: { show: isSparse || undefined, size: isSparse ? 7 : 5, fill: stroke },
      fill: this.panel.stack && item === this.series[0] ? faded(item.color, 0.55) : undefined,
    };
  }

  yRange(min, max) {
    if (this.extra) return [-0.5, this.extra.largest + 0.9];
    if (this.panel.stack) return [0, 1];
    if (min === null || max === null) return [this.isLog ? 0.1 : 0, 1];
    if (this.isLog) return uPlot.rangeLog(min, max, 10, false);
    let [low, high] = [min, max];
    if (this.panel.zero) low = Math.min(0, low);
    if (this.panel.max) high = Math.max(high, this.panel.max);
    if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
    const room = (high - low) * 0.08;
    return [low === 0 && this.panel.zero ? 0 : low - room, this.panel.max === high ? high : high + room];
  }

  ticks(ticks) {
    if (this.isLog) return ticks.map((tick) => (tick === null ? "" : axisLabels([tick], this.format)[0]));
    return axisLabels(ticks, this.format);
  }

  makeLegend() {
    const items = this.series.map((item) => ({ id: item.id, label: item.label, color: item.color, look: item.hiddenLine ? "none" : item.isOther ? "dashed" : "line" }));
    if (this.extra) items.push({ id: "bound", label: "bound", color: "bound", look: "dashed" });
    replace(this.legend, items.map((item) =>
      el("li", { "data-series": item.id, "data-value": "" },
        el("i", { class: `swatch ${item.look}`, style: { "--swatch": `var(--${item.color})` } }),
        el("span", { text: item.label }), el("b", { text: "–" }))));
  }

  /** Shows the values at the cursor, or else the newest ones. */
  showValues() {
    const columns = this.extra ? [...this.columns, this.extra.bound] : this.columns;
    const steps = this.store.columns.step;
    const at = this.cursor ?? steps.length - 1;
    const shown = [...this.legend.children];
    setText(this.at, this.cursor === null || !steps.length ? "" : this.place(at));
    columns.forEach((column, i) => {
      const value = this.cursor === null ? newest(column) : column?.[at] ?? null;
      shown[i].dataset.value = value === null ? "" : String(value);
      setText(shown[i].lastChild, this.format(value));
    });
  }

  /** Returns the step of a point, and its place on another axis. */
  place(at) {
    const step = `step ${Math.round(this.store.columns.step[at]).toLocaleString("en-US")}`;
    const { words, format } = chosenAxis();
    const places = placesOf(this.store);
    return places === this.store.columns.step || words === "steps" ? step : `${step} · ${format(places[at])}${format === number ? " tokens" : ""}`;
  }

  /** Says in words what the chart shows, for those who cannot see it. */
  describe() {
    const parts = this.series.map((item, i) => {
      const known = (this.columns[i] ?? []).filter((value) => value !== null);
      if (!known.length) return `${item.label}: no values`;
      const [low, high] = known.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
      return `${item.label}: now ${this.format(known.at(-1))}, from ${this.format(low)} to ${this.format(high)}`;
    });
    this.box.setAttribute("aria-label", `${this.panel.title} over ${chosenAxis().words}. ${parts.join("; ")}.`);
  }

  zoom(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    zoomTo(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }

  fit() {
    const width = this.box.clientWidth;
    if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  remove() {
    this.resize.disconnect();
    this.plot?.destroy();
    this.element.remove();
  }
}

const dashOf = (item) => (item.isOther ? [5, 4] : undefined);

function newest(column) {
  for (let i = (column?.length ?? 0) - 1; i >= 0; i -= 1) if (column[i] !== null) return column[i];
  return null;
}

function stacked(columns) {
  const sums = [];
  for (const column of columns) {
    const below = sums.at(-1);
    sums.push(column.map((value, i) => (value === null ? null : value + (below?.[i] ?? 0))));
  }
  return sums;
}

function edges(middle, spread) {
  const edge = (sign) => middle.map((value, i) => (value === null || spread[i] === null ? null : value + sign * spread[i]));
  return [edge(1), edge(-1)];
}

function faded(name, alpha) {
  return `color-mix(in srgb, ${color(name)} ${alpha * 100}%, transparent)`;
}

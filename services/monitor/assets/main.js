// Asks the monitor for what is new, again and again, and shows it. Nothing is asked while the page is hidden.

import { ask, receivedBytes } from "./api.js";
import { startAxis } from "./axis.js";
import { Chart } from "./chart.js";
import { laidOver } from "./compare.js";
import { byId, setText } from "./dom.js";
import { pollEvents, startEvents } from "./events.js";
import { pollFiles, startFiles } from "./files.js";
import { bytes } from "./format.js";
import { History } from "./history.js";
import { startLook } from "./look.js";
import { otherPanels, PANELS, seriesOf } from "./panels.js";
import { showDrops, showEngines, showProcesses } from "./processes.js";
import { forgetZoom, startRange } from "./range.js";
import { retrySamples, startSamples } from "./samples.js";
import { showState, showTiles } from "./summary.js";
import { onTheme, startTheme } from "./theme.js";
import { servedVersions, showVersions, startTimeline } from "./timeline.js";

const POLL_MS = 2000;
const SLOW_EVERY = 3; // rounds between two questions for events and versions
const OVER_EVERY = 5; // rounds between two rounds of a run that is over

const run = new History();
const store = run.store;
let other = null; // history of the run that is laid over this one
const charts = new Map();
let state = null;
let versions = 0;
let round = 0;

function drawCharts() {
  const panels = [...PANELS, ...otherPanels(store)];
  const shown = other?.store.length ? laidOver(store, other.store) : store;
  const wanted = new Map(panels.map((panel) => [panel.id, [panel, seriesOf(panel, shown)]]).filter(([, [panel, series]]) => series.length && !isNothing(panel, series, shown)));
  for (const [id, [panel, series]] of wanted) {
    if (!charts.has(id)) charts.set(id, new Chart(panel, document.querySelector(`[data-section="${panel.section}"]`)));
    charts.get(id).update(shown, series);
  }
  for (const [id, chart] of charts) if (!wanted.has(id)) { chart.remove(); charts.delete(id); }
  order(panels);
  byId("other").hidden = ![...charts.values()].some((chart) => chart.panel.section === "other");
}

/** Whether a chart of losses would show that there were none. */
const isNothing = (panel, series, shown) => panel.section === "losses" && !series.some((item) => shown.values(item.name).some(Boolean));

/** Charts come in the order of the table, whenever their fields turned up; the timeline and the reasons stay last. */
function order(panels) {
  panels.filter((panel) => charts.has(panel.id)).forEach((panel, i) => charts.get(panel.id).element.style.setProperty("order", panel.id === "pause" ? "60" : String(i)));
}

async function pollSteps() {
  const isSlow = round % SLOW_EVERY === 0;
  const changed = await Promise.all([run.poll(isSlow), other?.poll(isSlow)]);
  if (changed.some(Boolean) && store.length) drawCharts();
}

async function pollState() {
  const answer = await ask("status.json");
  if (!answer.run_state) return; // the monitor has not asked the ledger yet
  state = answer;
  if (state.compared) other ??= new History("other/");
  showState(state);
}

async function pollVersions() {
  const answer = await ask("versions.json", { after: versions });
  versions = answer.last;
  showVersions(answer, state?.engines.map((item) => item.engine));
}

function show() {
  showTiles(store, state, isOver());
  if (!state) return;
  showProcesses(state, store);
  showEngines(state, servedVersions());
  showDrops(state);
  document.body.dataset.ready = store.complete ? "yes" : "no";
}

async function poll() {
  const questions = [pollSteps(), pollState()];
  if (round % SLOW_EVERY === 0) questions.push(pollEvents(), pollVersions(), pollFiles());
  const failed = (await Promise.allSettled(questions)).find((result) => result.status === "rejected");
  round += 1;
  setText(byId("link"), failed ? "connection lost" : "");
  byId("link").classList.toggle("lost", Boolean(failed));
  byId("link").title = failed ? String(failed.reason.message) : "";
  if (failed) console.warn(String(failed.reason.message));
  show();
  retrySamples();
  setText(byId("traffic"), `read-only · ${bytes(receivedBytes())} in the last minute`);
}

const isOver = () => state && store.complete && (!state.compared || other?.store.complete) && (state.source === "files" || state.run_state === "done");

async function pollForever() {
  for (let tick = 0; ; tick += 1) {
    if (!document.hidden && (!isOver() || tick % OVER_EVERY === 0)) await poll();
    await new Promise((done) => setTimeout(done, POLL_MS));
  }
}

startTheme(byId("theme"));
startRange(byId("range"), () => charts.forEach((chart) => chart.setRange()));
startAxis(byId("axis"), () => { forgetZoom(); if (store.length) drawCharts(); });
startLook(byId("scale"), byId("smoothing"), () => store.length && drawCharts());
startEvents();
startFiles();
startTimeline();
startSamples();
onTheme(() => charts.forEach((chart) => chart.rebuild()));
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
pollForever();

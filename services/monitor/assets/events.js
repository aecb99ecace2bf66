// The newest events of the run as sentences.

import { ask } from "./api.js";
import { byId, el, replace, segments } from "./dom.js";
import { clock, moment } from "./format.js";

const TOPICS = [["run", "Run"], ["versions", "Versions"], ["losses", "Losses"], ["groups", "Groups"]];
const KEPT = 200;
const chosen = new Set(["run", "losses"]);
let newest = 0;
let events = [];
let warnings = [];

/** Wires the choice of topics. */
export function startEvents() {
  segments(byId("event-topics"), TOPICS, (topic) => chosen.has(topic), (topic) => {
    if (!chosen.delete(topic)) chosen.add(topic);
    newest = 0;
    events = [];
    pollEvents();
  });
}

/** Asks for events that came since the last time, and shows them on top. */
export async function pollEvents() {
  const topics = [...chosen].join();
  const answer = await ask("events.json", { after: newest, topics });
  if (topics !== [...chosen].join()) return; // chosen anew meanwhile
  if (answer.last < newest) events = []; // another log
  newest = answer.last;
  const warned = JSON.stringify(answer.warnings) !== JSON.stringify(warnings);
  if (!answer.events.length && !warned && byId("events").children.length) return;
  events = [...events, ...answer.events].slice(-KEPT);
  warnings = answer.warnings;
  const shown = [...events, ...warnings].sort((a, b) => a.time_ms - b.time_ms);
  replace(byId("events"), shown.length ? shown.toReversed().map(item) : el("li", { class: "empty", text: "No such event yet." }));
}

function item(event) {
  return el("li", { class: event.level, "data-seq": event.seq },
    el("time", { datetime: new Date(event.time_ms).toISOString(), title: `${event.seq ? `event ${event.seq}` : event.kind}, ${moment(event.time_ms)}`, text: clock(event.time_ms) }),
    el("span", { text: event.text }));
}

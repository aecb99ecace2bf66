// The settings of the run and the ends of its logs; each is asked for only while it is open.

import { ask } from "./api.js";
import { byId, el, replace, setText } from "./dom.js";

const SHOW = { settings: showSettings, logs: showLogs };

/** Wires the panels. */
export function startFiles() {
  for (const name of Object.keys(SHOW)) byId(name).addEventListener("toggle", () => pollFile(name));
  byId("setting-filter").addEventListener("input", filterSettings);
  byId("log-name").addEventListener("change", () => pollFile("logs"));
}

/** Asks again for the logs, if they are open: settings stay. */
export const pollFiles = () => pollFile("logs");

async function pollFile(name) {
  if (byId(name).open) await SHOW[name]();
}

/** Shows the settings; of two runs the ones that differ come first, with both values. */
async function showSettings() {
  const runs = await Promise.all(["", ...(byId("compared").hidden ? [] : ["other/"])].map((folder) => ask(`${folder}settings.json`)));
  const values = runs.map((answer) => new Map(Object.entries(answer).flatMap(([section, table]) => Object.entries(table).flatMap(([key, value]) => flat(`${section}.${key}`, value)))));
  const rows = [...new Set(values.flatMap((known) => [...known.keys()]))].map((key) => [key, [...new Set(values.map((known) => known.get(key) ?? "–"))]]);
  rows.sort((a, b) => b[1].length - a[1].length);
  replace(byId("setting-rows"), rows.map(([key, shown]) => el("tr", { "data-setting": key }, el("th", { scope: "row", text: key }), el("td", { text: shown.join(" / ") }))));
  filterSettings();
}

/** Returns rows of a dotted name and a value; nested tables become one row for each of their values. */
function flat(name, value) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return [[name, JSON.stringify(value)]];
  return Object.entries(value).flatMap(([key, inner]) => flat(`${name}.${key}`, inner));
}

function filterSettings() {
  const part = byId("setting-filter").value.trim().toLowerCase();
  for (const row of byId("setting-rows").children) row.hidden = !row.textContent.toLowerCase().includes(part);
}

async function showLogs() {
  const box = byId("log-name"), text = byId("log-text");
  const answer = await ask("logs.json", { name: box.value || null });
  if (box.dataset.names !== answer.names.join()) {
    box.dataset.names = answer.names.join();
    replace(box, answer.names.map((name) => el("option", { value: name, text: name, selected: name === answer.name })));
  }
  const isAtEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 4;
  setText(text, answer.text || "Nothing was logged.");
  if (isAtEnd) text.scrollTop = text.scrollHeight;
}

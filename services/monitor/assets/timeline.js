// When each version was committed, and which version each engine served meanwhile.

import { byId, el, replace, svg } from "./dom.js";
import { clock, clocks } from "./format.js";

const ROW = 26, GAP = 4, NAME = 84, AXIS = 18, LETTER = 6.6;
const SHOWN_ENGINES = 10;
const BEHIND = ["c1", "c1", "c2", "c5"];
const WORDS = ["current", "1 behind", "2 behind", "3 or more behind"];
let current = null;
let running = null;

/** Takes an answer of /versions.json and the incarnations of running engines, null if unknown, and draws both. */
export function showVersions(answer, engines) {
  if (!answer.unchanged) current = answer;
  running = engines && new Set(engines);
  draw();
}

/** Returns what /versions.json last said of the engines. */
export const servedVersions = () => current?.engines ?? [];

/** Keeps the drawing as wide as its panel. */
export function startTimeline() {
  new ResizeObserver(draw).observe(byId("timeline"));
  replace(byId("timeline-legend"), WORDS.map((word, i) =>
    el("li", {}, el("i", { class: "swatch block", style: { "--swatch": `var(--${BEHIND[i]})`, opacity: opacity(i) } }), el("span", { text: word }))));
}

const opacity = (behind) => (behind === 1 ? 0.45 : 0.9);

function draw() {
  const box = byId("timeline");
  const width = box.clientWidth;
  if (!current?.commits.length || width < 50) {
    if (!current?.commits.length) replace(box, el("p", { class: "empty", text: "No version was committed yet." }));
    return;
  }
  const commits = current.commits.slice(-Math.max(6, Math.floor(width / 34)));
  const engines = current.engines.slice(-SHOWN_ENGINES);
  const begin = commits[0][1];
  const end = Math.max(commits.at(-1)[1], ...engines.map((item) => item.served.at(-1)[1])) + (commits.at(-1)[1] - begin) * 0.02 + 1;
  const x = (ms) => NAME + ((Math.max(begin, ms) - begin) / (end - begin)) * (width - NAME);
  const height = (engines.length + 1) * (ROW + GAP) + AXIS;
  const rows = [name("committed", 0), ...commits.map(([version, ms], i) => segment(version, ms, commits[i + 1]?.[1] ?? end, 0, "ink", 0.12 + 0.08 * (version % 2), x, "committed"))];
  engines.forEach((item, i) => {
    const y = (i + 1) * (ROW + GAP);
    const last = !running || running.has(item.engine) ? end : item.last_ms; // no event says when an engine ended
    rows.push(name(shorten(item.engine), y));
    item.served.forEach(([version, ms], k) => rows.push(...served(item, version, ms, item.served[k + 1]?.[1] ?? last, commits, y, x, end)));
  });
  rows.push(...axis(begin, end, height, width, x));
  replace(box, svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": describe(commits, engines) }, rows));
}

/** The pieces of one served version: it becomes the older, the more versions are committed while it is served. */
function* served(item, version, from, to, commits, y, x, end) {
  if (to <= commits[0][1]) return;
  const cuts = commits.filter(([newer, ms]) => newer > version && ms > from && ms < to);
  const edges = [from, ...cuts.map(([, ms]) => ms), to];
  for (let i = 0; i + 1 < edges.length; i += 1) {
    const newest = commits.filter(([, ms]) => ms <= edges[i]).at(-1)?.[0] ?? version;
    const behind = Math.min(3, Math.max(0, newest - version));
    yield segment(i === 0 ? version : null, edges[i], Math.min(edges[i + 1], end), y, BEHIND[behind], opacity(behind), x, `${item.engine} serves version ${version}, ${WORDS[behind]}`);
  }
}

function segment(version, from, to, y, color, opacity, x, what) {
  const left = x(from), width = Math.max(1, x(to) - left - 1);
  const label = version === null ? "" : String(version);
  const fits = label && width > label.length * LETTER + 4;
  return svg("g", {},
    svg("title", {}, `${version === null ? "" : `version ${version}: `}${what}, ${clock(from)} to ${clock(to)}`),
    svg("rect", { x: left, y, width, height: ROW, rx: Math.min(3, width / 2), style: { fill: `var(--${color})`, "fill-opacity": String(opacity) } }),
    fits ? svg("text", { x: left + 4, y: y + ROW / 2 + 4, class: color === "ink" || opacity < 0.6 ? "" : "on" }, label) : "");
}

function* axis(begin, end, height, width, x) {
  const steps = Math.max(1, Math.floor((width - NAME) / 140));
  const times = Array.from({ length: steps + 1 }, (_, i) => begin + ((end - begin) * i) / steps);
  const labels = clocks(times);
  for (const [i, ms] of times.entries()) {
    yield svg("text", { x: x(ms), y: height - 4, class: "tick", "text-anchor": i === 0 ? "start" : i === steps ? "end" : "middle" }, labels[i]);
  }
}

const name = (text, y) => svg("text", { x: 0, y: y + ROW / 2 + 4, class: "lane" }, text);
const shorten = (incarnation) => incarnation.replace(/\.[^.]*$/, "").slice(0, 12);

function describe(commits, engines) {
  const newest = engines.map((item) => `${shorten(item.engine)} serves version ${item.served.at(-1)[0]}`).join("; ");
  return `Versions ${commits[0][0]} to ${commits.at(-1)[0]} were committed from ${clock(commits[0][1])} to ${clock(commits.at(-1)[1])}. ${newest}.`;
}

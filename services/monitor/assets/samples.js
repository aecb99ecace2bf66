// A browser of samples: one group of one step at a time.

import { ask } from "./api.js";
import { byId, el, replace } from "./dom.js";
import { count, number } from "./format.js";

let shown = { step: null, group: null };
let asked = 0;
let answered = 0;

/** Wires the form and shows the newest step. */
export function startSamples() {
  byId("sample-step").addEventListener("change", (event) => choose(event.target.value, null));
  byId("sample-group").addEventListener("change", (event) => choose(shown.step, event.target.value));
  for (const name of ["least", "most"]) byId(`sample-${name}`).addEventListener("change", () => load(shown.step, shown.group));
  byId("sample-newest").addEventListener("click", () => { link(""); load(null, null); });
  byId("sample-form").addEventListener("submit", (event) => event.preventDefault());
  const linked = new URLSearchParams(location.hash.slice(1));
  load(linked.get("step"), linked.get("group"));
}

/** Asks again while nothing could be shown yet, but not in place of what is asked already: it may be a link's. */
export function retrySamples() {
  if (shown.step === null && answered === asked) load(null, null);
}

/** Shows a group, and leaves it in the page's URL: a link to it. */
function choose(step, group) {
  link(`#step=${step}${group === null ? "" : `&group=${group}`}`);
  load(step, group);
}

const link = (hash) => history.replaceState(null, "", location.pathname + location.search + hash);

async function load(step, group) {
  const turn = ++asked;
  try {
    const answer = await ask("samples.json", { step, group, least: byId("sample-least").value || null, most: byId("sample-most").value || null });
    if (turn === asked) show(answer);
  } catch (error) {
    if (turn === asked) replace(byId("samples"), el("p", { class: "empty", text: error.message }));
  }
  if (turn === asked) answered = turn;
}

function show(answer) {
  shown = { step: answer.step, group: answer.group };
  offer(byId("sample-step"), answer.steps.toReversed().map((step) => [step, String(step)]), answer.step);
  offer(byId("sample-group"), answer.groups.map((item) => [item.group, `${item.group} · ${number(item.reward_mean)} · ${item.prompt.slice(0, 28)}`]), answer.group);
  if (!answer.samples.length) {
    replace(byId("samples"), el("p", { class: "empty", text: `There is nothing to show: ${answer.reason}.` }));
    return;
  }
  replace(byId("samples"),
    el("div", { class: "prompt" }, el("span", { text: "Prompt" }), el("pre", { text: answer.prompt })),
    answer.task ? el("p", { class: "task", text: answer.task }) : null,
    answer.samples.map((sample) => card(sample, Math.max(1, ...answer.samples.map((other) => other.reward ?? 0)))));
}

function offer(select, choices, value) {
  replace(select, choices.map(([choice, label]) => el("option", { value: choice, text: label, selected: choice === value })));
  select.disabled = !choices.length;
}

/** `best` is the reward that is as green as can be: 1, or the largest of the group. */
function card(sample, best) {
  const reward = sample.reward;
  const level = reward === null ? "" : reward > 0 ? "good" : reward < 0 ? "bad" : "";
  const facts = [
    count(sample.tokens, "token"), sample.finish_reason,
    sample.versions.length ? `version ${sample.versions.join(", ")}` : "",
    sample.lags.length ? `lag ${sample.lags.join(", ")}` : "",
    ...(Object.keys(sample.components).length > 1 ? Object.entries(sample.components).map(([name, value]) => `${name} ${number(value)}`) : []),
  ];
  return el("div", { class: "sample" },
    el("b", { class: `score ${level}`, text: number(reward), "data-value": reward ?? "", style: { "--part": `${Math.round((100 * Math.max(0, reward ?? 0)) / best)}%` } }),
    el("div", {}, el("pre", { text: sample.text || "(empty)" }), sample.is_cut ? el("em", { text: "cut off here" }) : null,
      el("small", { text: facts.filter(Boolean).join(" · ") }),
      sample.branches.length ? branchList(sample.branches) : null,
      sample.turns.length ? turnList(sample.turns) : null, sample.remarks.map(remark)));
}

function turnList(turns) {
  return el("details", { class: "branches" }, el("summary", { text: count(turns.length, "turn") }),
    el("ol", { start: 0 }, turns.map((turn) => el("li", { text: [
      turn.context.trim() ? `before it: ${turn.context.trim()}` : "",
      turn.reward === null ? "" : `reward ${number(turn.reward)}`, ...Object.entries(turn.components).map(([name, value]) => `${name} ${number(value)}`),
      count(turn.tokens, "token"), turn.text,
    ].filter(Boolean).join(" · ") }))));
}

function branchList(branches) {
  return el("details", { class: "branches" }, el("summary", { text: `${branches.length} branches` }),
    el("ol", { start: 0 }, branches.map((branch) => el("li", { text: [
      count(branch.tokens, "token"), `${branch.sampled} sampled`,
      branch.parent === null ? "" : `behind ${branch.shared} of branch ${branch.parent}`,
    ].filter(Boolean).join(" · ") }))));
}

function remark(said) {
  const facts = [`${said.verifier} said${said.of_group ? " of all samples" : ""}`, said.is_cached ? "cached" : "", count(said.tokens, "token"), said.cost ? `cost ${number(said.cost)}` : ""];
  return el("details", { class: "remark" }, el("summary", { text: facts.filter(Boolean).join(" · ") }), el("pre", { text: said.text }));
}

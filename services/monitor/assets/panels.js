// The table of charts: which fields of a step each one draws. A chart without any measured field is not shown;
// fields that no chart names get one each under "Other measurements".

import { OTHER, otherOf } from "./compare.js";
import { milliseconds, number, percent, seconds } from "./format.js";

const share = { format: percent, zero: true };
const perStep = { zero: true };

/** Charts in order. A series is a field's name with its label, a `match` for names that are not known beforehand,
 *  or `from`/`compute` for a value made of several fields. */
export const PANELS = [
  {
    id: "reward", section: "learning", wide: true, title: "Reward",
    help: "Mean reward of the trained groups; the band is one standard deviation of single samples.",
    series: [
      { name: "reward_mean", label: "training", color: "c1", band: "reward_std" },
      { name: "shaped_reward_mean", label: "after the length penalty", color: "c2" },
      { match: /^eval_/, color: "c3", points: true },
    ],
  },
  { id: "scores", section: "learning", title: "Reward by source, score by verifier", help: "Means over samples; scores before weighting.", series: [{ match: /^reward_of_/, color: "c1" }, { match: /^score_by_/, color: "c3" }] },
  { id: "loss", raw: true, section: "learning", title: "Loss", help: "What the optimizer minimized.", series: [{ name: "loss", label: "policy", color: "c1" }, { name: "value_loss", label: "critic", color: "c3" }, { match: /_loss(_mean)?$/, color: "c2" }] },
  {
    id: "kl", section: "learning", title: "KL divergence", zero: true, help: "Estimator k3, nats per token: from the engine's policy, and from the initial model.",
    series: [{ name: "behaviour_kl_k3", label: "from the engine", color: "c1" }, { name: "reference_kl_k3", label: "from the initial model", color: "c2" }, { name: "teacher_kl_k1", label: "from the teacher", color: "c3" }, { match: /(^|_)kl($|_)/, color: "c4" }],
  },
  { id: "entropy", section: "learning", title: "Entropy", zero: true, help: "Of the model's distribution, nats per token.", series: [{ name: "entropy", label: "entropy", color: "c3" }, { match: /^entropy_/, color: "c2" }] },
  { id: "clip", section: "learning", title: "Clipped tokens", ...share, help: "Share of tokens with a clipped ratio: in the loss, and if it were measured from the engine's policy.", series: [{ name: "clip_fraction", label: "in the loss", color: "c2" }, { name: "behaviour_clip_fraction", label: "from the engine", color: "c1" }, { name: "value_clip_fraction", label: "of the critic", color: "c3" }, { match: /^clip_/, color: "c4" }] },
  { id: "grad_norm", raw: true, section: "learning", title: "Gradient norm", zero: true, help: "Before clipping.", series: [{ name: "grad_norm", label: "norm", color: "c1" }, { name: "critic_grad_norm", label: "of the critic", color: "c3" }, { match: /^grad_norm_/, color: "c2" }] },
  {
    id: "lengths", section: "learning", title: "Response length", zero: true, help: "Tokens of a sample.",
    series: [{ name: "response_length_mean", label: "mean", color: "c1" }, { name: "dropped_length_mean", label: "of dropped groups", color: "c5", points: true }, { name: "cancelled_length_mean", label: "when cancelled", color: "c4", points: true }, { match: /^response_length_/, color: "c3" }],
  },
  { id: "truncated", section: "learning", title: "Truncated samples", ...share, help: "Ended by the token limit.", series: [{ name: "truncated_share", label: "truncated", color: "c5" }, { match: /truncated/, color: "c5" }] },
  {
    id: "lag", section: "freshness", wide: true, title: "Lag of trained tokens", lag: true,
    help: "In versions. Darker cells hold more of a step's tokens; dashed is the bound.",
    series: [
      { name: "lag_mean", label: "mean", color: "ink" },
      { name: "lag_max", label: "largest", color: "c2", hiddenLine: true },
    ],
  },
  {
    id: "lag_split", section: "freshness", title: "Where lag comes from", zero: true, help: "Versions that passed while the group was generated, and while it waited for its step.",
    series: [{ name: "lag_in_flight_mean", label: "in flight", color: "c3" }, { name: "lag_in_queue_mean", label: "in the queue", color: "c2" }],
  },
  {
    id: "mismatch", raw: true, section: "freshness", title: "Mismatch", zero: true, help: "|log-probability of the trainer - of the engine| at lag 0, nats.",
    series: [
      { name: "mismatch_mean", label: "mean", color: "c1", points: true }, { name: "mismatch_max", label: "largest", color: "c4", points: true },
      { name: "logprob_error_max", label: "largest of all", color: "c5", points: true }, { match: /mismatch|^logprob_/, color: "c4" },
    ],
  },
  { id: "mult_error", raw: true, section: "freshness", title: "Probability error", help: "token_mult_prob_error at lag 0: 1 is perfect agreement.", series: [{ name: "token_mult_prob_error", label: "factor", color: "c5", points: true }] },
  {
    id: "ratio", raw: true, section: "freshness", title: "Importance weights", help: "Probability now by that when sampled; and the loss's own ratio.",
    series: [
      { name: "importance_mean", label: "mean", color: "c1" }, { name: "importance_max", label: "largest", color: "c4" },
      { name: "ratio_mean", label: "in the loss", color: "c2" }, { match: /ratio/, color: "c3" },
    ],
  },
  {
    id: "ess", section: "freshness", title: "Effective sample size", ...share, max: 1, help: "Of the importance weights, share of tokens; and the shares that were capped and rejected.",
    series: [{ name: "importance_ess", label: "effective", color: "c3" }, { name: "importance_capped", label: "capped", color: "c5" }, { name: "importance_rejected", label: "rejected", color: "c4" }],
  },
  {
    id: "tokens", section: "speed", title: "Throughput", zero: true, help: "Tokens of the batch per second of the whole step and of training; trained ones per second of the step.",
    series: [{ name: "tokens_per_s", label: "tokens/s", color: "c2" }, { name: "train_tokens_per_s", label: "while it trains", color: "c1" }, {
      id: "trained_tokens_per_s", label: "trained", color: "c3", from: ["trained_tokens", "step_s"],
      compute: (tokens, step) => (step > 0 ? tokens / step : null),
    }],
  },
  {
    id: "trainer_time", section: "speed", title: "Time of the trainer", format: percent, stack: true, help: "Share of each step; waits for groups.",
    series: [["train_s", "train", "c1"], ["publish_s", "publish", "c4"], ["wait_s", "wait", "c2"]].map(
      ([name, label, color], i) => ({
        id: `share_${name}`, label, color, from: ["train_s", "publish_s", "wait_s"],
        compute: (...parts) => { const all = parts[0] + parts[1] + parts[2]; return all > 0 ? parts[i] / all : null; },
      })),
  },
  { id: "mfu", section: "speed", title: "Trainer's use of its GPUs", ...share, max: 1, help: "Share of their best, while it trains (MFU).", series: [{ name: "mfu", label: "MFU", color: "c3" }] },
  { id: "busy", section: "speed", title: "Engines busy", ...share, max: 1, help: "Share of time with work to do, and the same of rewards.", series: [{ name: "engine_busy", label: "engines", color: "c3", points: true }, { name: "reward_busy", label: "rewards", color: "c5", points: true }, { match: /^engine_busy_/, color: "c1" }] },
  { id: "generate", section: "speed", title: "Generation time", zero: true, format: seconds, help: "Of a group, from lease to last token.", series: [{ name: "generate_s", label: "mean", color: "c1" }, { name: "score_s", label: "scoring", color: "c5" }, { match: /^generate_s_/, color: "c2" }] },
  { id: "pause", raw: true, section: "freshness", title: "Pause for an update", zero: true, format: milliseconds, help: "Longest of any engine.", series: [{ name: "pause_ms", label: "longest", color: "c5" }, { match: /^pause_ms_/, color: "c2" }] },
  { id: "dropped", raw: true, section: "losses", title: "Groups dropped per step", ...perStep, help: "Since the step before.", series: [{ name: "dropped_groups", label: "groups", color: "c5" }, { name: "filtered_groups", label: "without signal", color: "c4" }, { name: "cancelled_samples", label: "samples cancelled", color: "c3" }, { match: /^dropped_for_/, color: "c1" }] },
  {
    id: "wasted", raw: true, section: "losses", title: "Wasted tokens per step", ...perStep,
    help: "Of dropped groups, or over the bound.",
    series: [
      { name: "wasted_tokens", label: "wasted", color: "c5" }, { name: "masked_tokens", label: "masked", color: "c2" },
      { name: "filtered_tokens", label: "without signal", color: "c4" }, { name: "truncated_tokens", label: "truncated", color: "c1" },
      { name: "cancelled_tokens", label: "cancelled", color: "c3" },
    ],
  },
  ...[
    ["Groups without signal", { ...share, help: "Their rewards are all equal: of the batch, and of all that ended." }, ["frac_reward_zero_std", "in the batch"], ["filtered_share", "filtered"]],
    ["Tokens over the bound", { ...share, help: "Share of sampled tokens that the bound left out." }, ["masked_share", "masked"]],
    ["Prefix cache", { ...share, max: 1, help: "Share of tokens to continue that an engine had cached." }, ["prefix_hit_rate", "found"]],
    ["Size of the batch", { ...perStep, help: "Tokens of all samples, and those that passes computed." }, ["step_tokens", "tokens"], ["computed_tokens", "computed"]],
    ["Forward passes", { ...perStep, help: "Micro-batches of the busiest replica." }, ["micro_batches", "passes"]],
    ["Padding and imbalance", { ...share, help: "Wasted computation: padding, and the dearest replica over the mean." }, ["padding_share", "padding"], ["imbalance", "imbalance"]],
    ["Tokens computed once", { ...share, max: 1, help: "Share of tokens that another sample's computation stood for." }, ["shared_share", "shared"]],
    ["Updates of a step", { ...perStep, help: "Of the optimizer: made, and skipped." }, ["updates", "made"], ["updates_skipped", "skipped"]],
    ["Learning rate by sample size", { zero: true, max: 1, help: "Factor of algorithm.ess_scaling." }, ["lr_scale", "factor"]],
    ["Bonus for entropy", { zero: true, help: "Coefficient under algorithm.entropy_target." }, ["entropy_coef", "coefficient"]],
    ["KL in the reward", { zero: true, help: "Of a sample, before algorithm.kl_coef, nats." }, ["reward_kl_k1", "sum"]],
    ["Score by the reward model", { help: "Of a sample, by the model in the trainer's ranks, before its weight." }, ["reward_model_mean", "score"]],
    ["Training of the draft head", { zero: true, format: seconds, help: "In the trainer's wait for groups." }, ["drafts_s", "time"]],
    ["Values of the critic", { help: "Against the returns that it is trained towards." }, ["value_mean", "values"], ["return_mean", "returns"]],
    ["Explained variance", { help: "Of returns by the critic: 1 is best, below 0 is worse than a constant." }, ["explained_variance", "explained"]],
    ["Memory of a GPU", { zero: true, help: "Largest allocation of a rank of the trainer, GiB." }, ["memory_peak_gb", "peak"], ["memory_expected_gb", "expected"]],
    ["Load of experts", { zero: true, help: "Tokens of the busiest and the idlest one by the mean." }, ["expert_load_max", "busiest"], ["expert_load_min", "idlest"]],
    ["Scale of the loss", { zero: true, help: "In float16." }, ["loss_scale", "factor"]],
    ["Repeated steps", { ...perStep, help: "Gradients that overflowed in float16." }, ["loss_scale_repeats", "times"]],
  ].map(([title, how, ...fields]) => ({
    id: fields[0][0], section: "other", title, ...how, series: fields.map(([name, label], i) => ({ name, label, color: `c${i + 1}` })),
  })),
];

/** Fields that are drawn as a part of something else, or that say nothing over time. */
const USED = new Set(["start", "step", "time", "groups", "trained_tokens", "train_s", "publish_s", "wait_s", "step_s", "checkpoint_s", "other_s", "reward_std", "dropped_length_groups"]);
const MAX_OTHER = 16;

/** Returns the series of a panel that have values, with a field's own name where `match` found it. */
export function seriesOf(panel, store) {
  const named = new Set(PANELS.flatMap((other) => other.series.map((item) => item.name)));
  return panel.series.flatMap((item) => {
    if (item.from) return item.from.every((name) => store.has(name)) ? [item] : [];
    if (item.name) return store.has(item.name) ? [{ id: item.name, ...item }] : [];
    return matches(item.match, store, named).map((name, i) => ({
      ...item, id: name, name, label: name.replaceAll("_", " "), color: i ? `c${((Number(item.color[1]) + i - 1) % 6) + 1}` : item.color,
    }));
  }).flatMap((item) => [item, ...(panel.stack || item.hiddenLine ? [] : otherOf(item, store))]);
}

/** Returns panels for fields that no panel of the table draws. */
export function otherPanels(store) {
  const drawn = new Set(PANELS.flatMap((panel) => seriesOf(panel, store).map((item) => item.id)));
  return Object.keys(store.columns)
    .filter((name) => !USED.has(name) && !drawn.has(name) && store.has(name))
    .slice(0, MAX_OTHER)
    .map((name) => ({
      id: `other-${name}`, section: "other", title: name.replaceAll("_", " "),
      series: [{ name, label: name, color: "c1" }], format: number,
    }));
}

function matches(pattern, store, named) {
  return Object.keys(store.columns).filter((name) => !name.startsWith(OTHER) && !USED.has(name) && !named.has(name) && pattern.test(name) && store.has(name)).sort();
}

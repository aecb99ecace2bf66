"""Defines the report of one optimizer step, for the ledger, metrics.jsonl and the monitor."""

import msgspec

from protocol.messages.base import Message


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """Difference between the log-probabilities of trainer and engine, over the measured tokens of one lag.

    d = log pi(trainer, at the start of the step) - log pi(engine, when it sampled the token). At lag 0 both
    use the same weights, so d is the difference of the two implementations. At a larger lag, d also contains
    the policy's change since sampling.
    """

    tokens: int
    """Number of measured tokens."""
    error_mean: float
    """Mean of |d|, nats."""
    error_max: float
    """Largest |d|, nats."""
    token_mult_prob_error: float
    """Mean of exp |d|: the factor by which the probability of a token differs, 1 at best. As in NeMo RL,
    "Adding New Models", https://docs.nvidia.com/nemo/rl/0.6.0/adding-new-models.html."""
    ess: float
    """Effective sample size of the importance weights w = exp d, as a share of the tokens, 0 to 1: (sum w)^2
    / (tokens * sum w^2). Kish 1965; Kong 1992."""


class StepReport(Message, tag="step_report", frozen=True, kw_only=True):
    """Report of a committed step, sent by the trainer; docs/metrics.md explains every field.

    Times are wall-clock seconds unless the name says otherwise. None (null in metrics.jsonl) means that the
    value was not measured.
    """

    step: int
    """Number of the step, equal to the version at its start."""
    version: int
    """Version that the step produced: step + 1."""
    epoch: str
    reward_mean: float
    reward_std: float | None = None
    lag_mean: float | None = None
    """Mean lag of trained tokens, in versions."""
    lag_max: int | None = None
    lag_histogram: dict[int, int] = {}
    """Lag in versions -> trained tokens."""
    trained_tokens: int = 0
    masked_tokens: int = 0
    """Sampled tokens excluded from the loss because they exceeded the staleness bound."""
    wasted_tokens: int = 0
    """Tokens of groups dropped since the last step, plus the masked tokens of this step."""
    groups: int = 0
    dropped_groups: int = 0
    """Groups dropped since the last step."""
    response_length_mean: float | None = None
    """Mean number of tokens of a sample after the prompt, including tokens inserted by an environment."""
    loss: float | None = None
    grad_norm: float | None = None
    entropy: float | None = None
    clip_fraction: float | None = None
    """Share of trained tokens whose ratio the loss clipped, 0 to 1."""
    ratio_mean: float | None = None
    """Mean ratio pi / pi_old of the loss over trained tokens. With `trainer.recompute_logprobs`, pi_old is
    the policy at the start of the step. In a step of one update, the mean is then 1 and `clip_fraction` is 0,
    up to rounding. `importance_mean` and `behaviour_clip_fraction` always compare with the engine."""
    logprob_error_max: float | None = None
    """Largest |trainer log-probability - engine log-probability| over trained tokens of lag 0, nats."""
    generate_s: float | None = None
    """Mean time to generate a group of this step."""
    train_s: float = 0.0
    publish_s: float = 0.0
    wait_s: float = 0.0
    """Time that the trainer waited for groups before this step."""
    pause_ms: float | None = None
    """Longest generation pause that an engine reported for a weight update since the last step."""
    skipped: str = ""
    """Why the optimizer skipped the step (overflow ...); empty: the step was not skipped."""
    time: float = 0.0
    """Unix time of the commit, seconds."""
    engine_busy: float | None = None
    """Share of time, 0 to 1, in which awake engines had requests to run. Measured between the last heartbeats
    before the previous step and before this step; mean over the engines that sent a new heartbeat."""
    batch_digest: str = ""
    """xxh3-128 of the trained batch, 32 hex digits, for `tether replay`."""
    lag_in_flight_mean: float | None = None
    """Part of `lag_mean` that accrued until the last token of the group was sampled, in versions."""
    lag_in_queue_mean: float | None = None
    """Rest of `lag_mean`, until the step, in versions."""
    behaviour_kl_k3: float | None = None
    """KL(engine's policy || pi) over trained tokens by the estimator k3, nats per token; pi is the policy
    at the start of the step."""
    reference_kl_k3: float | None = None
    """KL(pi || initial model) over trained tokens by the estimator k3, nats per token; measured where
    `algorithm.kl_coef` > 0."""
    importance_mean: float | None = None
    """Mean over trained tokens of the importance weight pi / engine's policy, before truncation."""
    importance_max: float | None = None
    """Largest importance weight."""
    importance_capped: float | None = None
    """Share of trained tokens whose importance weight `algorithm.importance_cap` truncated, 0 to 1; measured
    if the loss truncates."""
    importance_ess: float | None = None
    """Effective sample size of the importance weights, as a share of the trained tokens, 0 to 1."""
    behaviour_clip_fraction: float | None = None
    """Share of trained tokens that the loss would clip if its ratio were pi / engine's policy, 0 to 1."""
    mismatch: dict[int, Mismatch] = {}
    """Lag in versions -> mismatch of trainer and engine. Measured over the trained tokens of that lag, in the
    share of groups that `trainer.mismatch_share` selects."""
    mismatch_mean: float | None = None
    """`mismatch[0].error_mean`."""
    mismatch_max: float | None = None
    """`mismatch[0].error_max`."""
    token_mult_prob_error: float | None = None
    """`mismatch[0].token_mult_prob_error`, which `trainer.mismatch_limit` bounds."""
    dropped_by_reason: dict[str, int] = {}
    """Drop reason -> groups dropped since the last step."""
    dropped_length_mean: float | None = None
    """Mean length, as `response_length_mean`, of groups dropped since the last step. Only scored groups
    count; the length of other groups is unknown."""
    dropped_length_groups: int = 0
    """Number of groups in `dropped_length_mean`."""
    warnings: tuple[str, ...] = ()
    """Possible problems of the step, one sentence each."""
    step_tokens: int = 0
    """Tokens of the batch, including prompts and inserted tokens; 0: not counted."""
    micro_batches: int | None = None
    """Forward passes of the data-parallel replica with the most passes."""
    padding_share: float | None = None
    """Share of padding in the tokens of the forward passes, 0 to 1."""
    imbalance: float | None = None
    """Relative excess of the most expensive data-parallel replica over the mean: cost / mean cost - 1."""
    step_s: float | None = None
    """Time since the previous step's report, or since this trainer began to train. Equals the sum of
    `wait_s`, `train_s`, `publish_s`, `checkpoint_s` and `other_s`."""
    checkpoint_s: float | None = None
    """Part of `step_s` in which steps waited for a checkpoint, an export or a snapshot: for its copy to host
    memory, and for the previous one to be written. It belongs to the version at the start of this step."""
    other_s: float | None = None
    """Rest of `step_s`: commit and announcement of the previous step, reading this step's records, halts."""
    tokens_per_s: float | None = None
    """Tokens of the batch, including prompts, per second of `step_s`."""
    mfu: float | None = None
    """Model FLOPs utilization, 0 to 1: FLOPs that the model needs for the batch / peak FLOPs of the devices
    in `train_s`. None on a CPU or an unknown GPU, and if the backend does not count."""
    memory_peak_gb: float | None = None
    """Peak GPU memory allocated by a rank of the trainer during the step, maximum over ranks, GiB."""
    memory_expected_gb: float | None = None
    """Predicted peak of the rank that needs the most memory, GiB."""
    expert_load_max: float | None = None
    """Tokens of the busiest expert in any layer / tokens per expert under uniform routing. None if the model
    has no experts or the backend does not count."""
    expert_load_min: float | None = None
    """Tokens of the least busy expert, in the unit of `expert_load_max`."""
    importance_rejected: float | None = None
    """Share of trained tokens without a policy gradient because of `algorithm.rejection_level` or
    `second_moment_threshold`, 0 to 1; measured if either is set."""
    loss_scale: float | None = None
    """Loss scale of the step in float16; None in other dtypes."""
    loss_scale_repeats: int | None = None
    """Times that the step was repeated with half the loss scale because its gradient overflowed; None unless
    float16."""
    updates: int | None = None
    """Optimizer updates of the step that changed weights."""
    updates_skipped: int | None = None
    """Skipped optimizer updates; `skipped` is empty unless all updates were skipped."""
    lr_scale: float | None = None
    """Factor of `algorithm.ess_scaling` on the learning rate, mean over the updates; None if it is off."""
    entropy_coef: float | None = None
    """Coefficient of the entropy bonus in this step; None without `algorithm.entropy_target`."""
    filtered_groups: int | None = None
    """Groups that `algorithm.filter_groups` dropped since the last step; None if the filter is off."""
    filtered_tokens: int | None = None
    """Sampled tokens of filtered groups, also part of `wasted_tokens`."""
    filtered_share: float | None = None
    """`filtered_groups` / (`filtered_groups` + `groups`), 0 to 1."""
    truncated_share: float | None = None
    """Share of samples that ended at the length limit, 0 to 1."""
    truncated_tokens: int | None = None
    """Sampled tokens excluded because their sample was truncated; not in `masked_tokens`. None unless
    `algorithm.truncated` is mask."""
    shaped_reward_mean: float | None = None
    """Mean reward after the penalty for overlong samples; None unless `algorithm.truncated` is shape."""
    teacher_kl_k1: float | None = None
    """Mean of log pi_engine - log pi_teacher over the trained tokens, nats; measured if a teacher is set."""
    reward_kl_k1: float | None = None
    """Sum of log pi_engine - log pi_ref over a sample's tokens, mean over the samples, nats.
    `algorithm.use_kl_in_reward` subtracts the sum from the reward; measured if it is set."""
    value_loss: float | None = None
    """Loss that the critic's optimizer minimized: the weighted sum of token losses; None, as the next critic
    fields, without a critic."""
    critic_grad_norm: float | None = None
    """L2 norm of the critic's gradient before clipping."""
    value_mean: float | None = None
    """Mean of the critic's values over trained tokens, before each update."""
    return_mean: float | None = None
    """Mean of the returns that it was trained towards."""
    explained_variance: float | None = None
    """1 - Var(return - value) / Var(return) over trained tokens: 1 at best; None if all returns are equal."""
    value_clip_fraction: float | None = None
    """Share of trained tokens whose value `critic.value_clip` left without a gradient, 0 to 1."""
    masked_share: float | None = None
    """`masked_tokens` / (`masked_tokens` + `trained_tokens`), 0 to 1; None if both are 0."""
    prefix_hit_rate: float | None = None
    """Share of context tokens whose KV was in the engine's prefix cache, over all calls for the batch's
    groups, 0 to 1; None if the engine does not count."""
    train_tokens_per_s: float | None = None
    """Tokens of the batch, including prompts, per second of `train_s`."""
    frac_reward_zero_std: float | None = None
    """Share of groups whose rewards are all equal among the groups of several samples, 0 to 1; None without
    such groups."""
    reward_by_source: dict[str, float] = {}
    """Prompt source, as named in the prompts' metadata -> mean reward of its samples."""
    score_by_verifier: dict[str, float] = {}
    """Verifier -> mean score of a sample, before weighting."""
    score_s: float | None = None
    """Mean time to score a group of this step."""
    reward_busy: float | None = None
    """Share of time, 0 to 1, in which reward services had groups to score, measured as `engine_busy`."""
    shared_share: float | None = None
    """Share of the batch's tokens that were not computed because another sample of the group has the same
    prefix, 0 to 1."""
    computed_tokens: int | None = None
    """Tokens that the forward passes of all updates computed, without padding."""
    cancelled_samples: int | None = None
    """Samples of the batch's groups that `sampling.keep_first` cancelled. None, as the next two, if none was.
    """
    cancelled_tokens: int | None = None
    """Tokens of the cancelled samples at cancellation. No other field counts these tokens."""
    cancelled_length_mean: float | None = None
    """`cancelled_tokens` / `cancelled_samples`, to be compared with `response_length_mean`. Complete samples
    would have been longer."""
    reward_model_mean: float | None = None
    """Mean score of a sample by the trainer's reward model, before weighting; not part of `reward_mean`. None
    without a reward model."""
    drafts_s: float | None = None
    """Part of `wait_s` in which the trainer trained its draft head (`engine.draft_lr`); None: no draft
    training."""
    draft_loss: float | None = None
    """Mean loss of the draft head's updates between the previous step and this step; None without updates."""

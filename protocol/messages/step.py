"""Defines the report of one optimizer step, for the ledger, metrics.jsonl and the monitor."""

import msgspec

from protocol.messages.base import Message


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """Distance of the trainer's log-probabilities from the engine's, over the measured tokens of one lag.

    d = log pi(trainer, at the start of the step) - log pi(engine, when it sampled the token). At lag 0 both
    have the same weights, so d is the difference of the two implementations. At a larger lag d also contains
    the policy's change since then.
    """

    tokens: int
    """Measured tokens."""
    error_mean: float
    """Mean of |d|, nats."""
    error_max: float
    """Largest |d|, nats."""
    token_mult_prob_error: float
    """Mean of exp |d|: the factor by which the probability of a token differs, 1 at best. As in NeMo RL,
    "Adding New Models", https://docs.nvidia.com/nemo/rl/0.6.0/adding-new-models.html."""
    ess: float
    """Effective sample size of the importance weights w = exp d as a share of the tokens, 0 to 1:
    (sum w)^2 / (tokens * sum w^2). Kish 1965; Kong 1992."""


class StepReport(Message, tag="step_report", frozen=True, kw_only=True):
    """Report of a committed step, made by the trainer; docs/metrics.md explains every field.

    Times are wall-clock seconds unless the name says otherwise. None (null in metrics.jsonl) is what was not
    measured.
    """

    step: int
    """Number of the step, which is the version that it started from."""
    version: int
    """The version that it produced: step + 1."""
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
    """Tokens of groups dropped since the last step, and masked tokens of this one."""
    groups: int = 0
    dropped_groups: int = 0
    """Groups dropped since the last step."""
    response_length_mean: float | None = None
    """Mean tokens of a sample after the prompt, tokens inserted by an environment included."""
    loss: float | None = None
    grad_norm: float | None = None
    entropy: float | None = None
    clip_fraction: float | None = None
    """Share of trained tokens at which the loss clipped its ratio, 0 to 1."""
    ratio_mean: float | None = None
    """Mean of the loss's ratio pi / pi_old over trained tokens. With `trainer.recompute_logprobs` pi_old is
    the policy at the start of the step, so in a step of one update this is 1 and `clip_fraction` 0 but for
    rounding; `importance_mean` and
    `behaviour_clip_fraction` always compare with the engine."""
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
    """Why the optimizer skipped the step (overflow ...); empty if it did not."""
    time: float = 0.0
    """Unix time of the commit, seconds."""
    engine_busy: float | None = None
    """Share of time, 0 to 1, in which engines had requests to run and were awake, between the heartbeats
    that came before the last step and before this one; mean over the engines that sent a newer one."""
    batch_digest: str = ""
    """xxh3-128 of the trained batch, 32 hex digits; `tether replay` compares with it."""
    lag_in_flight_mean: float | None = None
    """Part of `lag_mean` that passed until the last token of the token's group was sampled, in versions."""
    lag_in_queue_mean: float | None = None
    """The rest of `lag_mean`: from then until the step, in versions."""
    behaviour_kl_k3: float | None = None
    """KL(engine's policy || pi) over trained tokens by the estimator k3, nats per token; pi is the policy
    at the start of the step."""
    reference_kl_k3: float | None = None
    """KL(pi || initial model) over trained tokens by the estimator k3, nats per token; measured where
    `algorithm.kl_coef` > 0."""
    importance_mean: float | None = None
    """Mean over trained tokens of the importance weight pi / engine's policy, before truncation."""
    importance_max: float | None = None
    """Largest of these weights."""
    importance_capped: float | None = None
    """Share of trained tokens whose weight `algorithm.importance_cap` cut, 0 to 1; measured where the loss
    truncates."""
    importance_ess: float | None = None
    """Effective sample size of these weights as a share of the trained tokens, 0 to 1."""
    behaviour_clip_fraction: float | None = None
    """Share of trained tokens that the loss would clip if its ratio were pi / engine's policy, 0 to 1."""
    mismatch: dict[int, Mismatch] = {}
    """Lag in versions -> mismatch of trainer and engine over trained tokens of that lag in the share of
    groups that `trainer.mismatch_share` chooses."""
    mismatch_mean: float | None = None
    """`mismatch[0].error_mean`."""
    mismatch_max: float | None = None
    """`mismatch[0].error_max`."""
    token_mult_prob_error: float | None = None
    """`mismatch[0].token_mult_prob_error`, which `trainer.mismatch_limit` bounds."""
    dropped_by_reason: dict[str, int] = {}
    """Reason -> groups dropped for it since the last step."""
    dropped_length_mean: float | None = None
    """As `response_length_mean`, of groups dropped since the last step that had been scored: the only ones
    whose length is known."""
    dropped_length_groups: int = 0
    """Groups that `dropped_length_mean` is of."""
    warnings: tuple[str, ...] = ()
    """What may be wrong with the step, a sentence each."""
    step_tokens: int = 0
    """Tokens of the batch, prompts and inserted ones included; 0: not counted."""
    micro_batches: int | None = None
    """Forward passes that the busiest data-parallel replica made."""
    padding_share: float | None = None
    """Share of padding in the tokens of the forward passes, 0 to 1."""
    imbalance: float | None = None
    """By which share the dearest data-parallel replica's part costs more than the mean of all."""
    step_s: float | None = None
    """Time since the report of the step before, or since this trainer began to make steps. It is the sum of
    `wait_s`, `train_s`, `publish_s`, `checkpoint_s` and `other_s`."""
    checkpoint_s: float | None = None
    """Part of `step_s` in which steps waited for a checkpoint, an export or a snapshot: for the copy in host
    memory, and for the one before to be written. It belongs to the version that this step started from."""
    other_s: float | None = None
    """The rest of `step_s`: commit and announcement of the step before, reading this one's records, halts."""
    tokens_per_s: float | None = None
    """Tokens of the batch, prompts included, by `step_s`."""
    mfu: float | None = None
    """FLOPs that the model needs for the batch by those that the devices could have made in `train_s`, 0 to
    1; None on a CPU or an unknown GPU, and where the backend does not count."""
    memory_peak_gb: float | None = None
    """Largest memory that a rank of the trainer had allocated on its GPU during the step, GiB."""
    memory_expected_gb: float | None = None
    """The peak that was expected of the rank that takes the most, GiB."""
    expert_load_max: float | None = None
    """Tokens that the busiest expert of any layer got, by those that it would get if all got as many; None
    where the model has no experts, or the backend does not count."""
    expert_load_min: float | None = None
    """Tokens of the expert with the fewest, in the unit of `expert_load_max`."""
    importance_rejected: float | None = None
    """Share of trained tokens that `algorithm.rejection_level` or `second_moment_threshold` left without a
    policy gradient, 0 to 1; measured where one is set."""
    loss_scale: float | None = None
    """Factor of the loss that the step was made with, in float16; None in other types."""
    loss_scale_repeats: int | None = None
    """Times that the step was made again, under half the factor each, because its gradient overflowed; None
    in other types."""
    updates: int | None = None
    """Optimizer updates of the step that changed weights."""
    updates_skipped: int | None = None
    """Those that were skipped; `skipped` is empty unless all were."""
    lr_scale: float | None = None
    """What `algorithm.ess_scaling` multiplied the learning rate by, mean over the updates; None where it is
    off."""
    entropy_coef: float | None = None
    """Bonus for entropy that the step was made with; None without `algorithm.entropy_target`."""
    filtered_groups: int | None = None
    """Groups that `algorithm.filter_groups` dropped since the last step; None where it is off."""
    filtered_tokens: int | None = None
    """Their sampled tokens; they are in `wasted_tokens`, too."""
    filtered_share: float | None = None
    """`filtered_groups` by themselves and `groups` together, 0 to 1."""
    truncated_share: float | None = None
    """Share of samples that ended at the length limit, 0 to 1."""
    truncated_tokens: int | None = None
    """Sampled tokens left out because their sample ended there; None unless `algorithm.truncated` is mask.
    They are not in `masked_tokens`."""
    shaped_reward_mean: float | None = None
    """As `reward_mean`, after the overlong punishment; None unless `algorithm.truncated` is shape."""
    teacher_kl_k1: float | None = None
    """Mean of log pi_engine - log pi_teacher over the trained tokens, nats; measured where there is a
    teacher."""
    reward_kl_k1: float | None = None
    """Mean over the samples of the sum of log pi_engine - log pi_ref over a sample's tokens, nats, which
    `algorithm.use_kl_in_reward` subtracts from rewards; measured where it is set."""
    value_loss: float | None = None
    """Loss that the critic's optimizer minimized, the weighted sum of token losses; None, as all below,
    without a critic."""
    critic_grad_norm: float | None = None
    """L2 norm of the critic's gradient before clipping."""
    value_mean: float | None = None
    """Mean of the critic's values over trained tokens, before each update."""
    return_mean: float | None = None
    """Mean of the returns that it was trained towards."""
    explained_variance: float | None = None
    """1 - Var(return - value) / Var(return) over trained tokens: 1 at best; None if all returns are alike."""
    value_clip_fraction: float | None = None
    """Share of trained tokens whose value `critic.value_clip` left without a gradient, 0 to 1."""
    masked_share: float | None = None
    """Share of `masked_tokens` in them and the trained ones, 0 to 1; None if there is neither."""
    prefix_hit_rate: float | None = None
    """Share of the tokens that engines were given to continue whose KV was in their prefix cache, over all
    calls for the batch's groups, 0 to 1; None where the engine does not count."""
    train_tokens_per_s: float | None = None
    """Tokens of the batch, prompts included, by `train_s`."""
    frac_reward_zero_std: float | None = None
    """Share of the groups of several samples whose rewards are all equal, 0 to 1; None if there is none."""
    reward_by_source: dict[str, float] = {}
    """Source of prompts, as their metadata names it -> mean reward of its samples."""
    score_by_verifier: dict[str, float] = {}
    """Verifier -> mean score of a sample, before weighting."""
    score_s: float | None = None
    """Mean time to score a group of this step."""
    reward_busy: float | None = None
    """As `engine_busy`, of reward services: share of time in which they had groups to score."""
    shared_share: float | None = None
    """Share of the batch's tokens that were not computed because another sample of the group begins with the
    same, 0 to 1."""
    computed_tokens: int | None = None
    """Tokens that the forward passes of all updates computed, without padding."""
    cancelled_samples: int | None = None
    """Samples of the batch's groups that `sampling.keep_first` cancelled; None, as below, if none was."""
    cancelled_tokens: int | None = None
    """Tokens that they had by then. They are in no other number."""
    cancelled_length_mean: float | None = None
    """`cancelled_tokens` by `cancelled_samples`: less than they would have had, to be compared with
    `response_length_mean`."""
    reward_model_mean: float | None = None
    """Mean score of a sample by the trainer's reward model, before its weight; it is not in `reward_mean`.
    None without one."""
    drafts_s: float | None = None
    """Part of `wait_s` in which the trainer trained its draft head (`engine.draft_lr`); None: none."""
    draft_loss: float | None = None
    """Mean loss of the head's updates between the step before and this one; None if there were none."""

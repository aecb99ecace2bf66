"""Runs the updates of a step with all models of this rank, and merges their measurements."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from trainer.algorithms.registry import ALGORITHMS
from trainer.backends.base import NOTHING_TRAINED, StepStats
from trainer.batch import Batch
from trainer.config import AlgorithmConfig
from trainer.functional.losses import leaves_trust_region, log_ratio_limit
from trainer.ranks.collectives import concatenate_replicas
from trainer.roles.advantages import with_advantages, with_frozen, with_whitened
from trainer.roles.models import RankModels
from trainer.step.measures import StepMeasures
from trainer.step.train_command import UpdateSchedule


def make_updates(models: RankModels, part: Batch, schedule: UpdateSchedule) -> StepStats:
    """Run the updates of a step, after the forward passes of all models that stay fixed. A collective.

    The step makes one version, for any number of updates.

    Args:
        models: this rank's shards of the models.
        part: samples of this rank's replica.
        schedule: updates of the step.

    Returns:
        Statistics of the step, equal on every rank.
    """
    part, measured = _with_roles(models, part, schedule)
    updates = []
    for batch in batches_of(part, schedule):
        if schedule.second_moment_threshold:
            batch = _within_moment(models, batch, schedule.second_moment_threshold)
        updates.append(msgspec.structs.replace(_update(models, batch), **measured))
    if models.entropy is not None:
        models.entropy.note(updates)
    return merged_updates(models.algorithm.config, updates, schedule)


def batches_of(part: Batch, schedule: UpdateSchedule) -> Iterator[Batch]:
    """Yield the replica's part of each update's mini-batch, one at a time."""
    if not schedule.mini_batches:
        yield part
        return
    for number in schedule.updates:
        yield part.select_mini_batch(number, schedule.mini_batches[number])


def _update(models: RankModels, batch: Batch) -> StepStats:
    """Update every trained model on this replica's part of a mini-batch.

    During the critic's warm-up steps, only the critic is updated.
    """
    critic, tokens = models.critic, batch.totals.trained_tokens
    stats = StepStats(trained_tokens=tokens, skipped="" if tokens else NOTHING_TRAINED)
    if critic is None or batch.step >= critic.config.critic_warmup_steps:
        stats = models.policy.train_step(batch)
    if critic is not None:
        stats = stats.with_critic(critic.train_step(batch))
    return msgspec.structs.replace(stats, entropy_coef=batch.entropy_coef)


def _within_moment(models: RankModels, batch: Batch, budget: float) -> Batch:
    """Return the batch with the clip from M2PO's trust region. A collective."""
    moved = (models.policy.logprobs(batch) - batch.behaviour_logprobs)[batch.loss_mask]
    leaving = moved[leaves_trust_region(moved, batch.advantages[batch.loss_mask])]
    everywhere = concatenate_replicas(leaving.square(), models.policy.replicas)
    return dataclasses.replace(batch, log_ratio_limit=log_ratio_limit(everywhere, budget))


def _with_roles(models: RankModels, part: Batch, schedule: UpdateSchedule) -> tuple[Batch, dict[str, Any]]:
    """Return the part with the outputs of the other models and of the start policy, and the measurements."""
    found: dict[str, Any] = {}
    if schedule.start_logprobs:
        found["start_logprobs"] = models.policy.logprobs(part)
    if models.entropy is not None:
        found["entropy_coef"] = models.entropy.bonus.in_force
    part = dataclasses.replace(part, **found)
    part, measured = with_frozen(
        part, models.policy, models.frozen, models.algorithm, reference=schedule.reference_logprobs
    )
    if models.critic is not None:
        values = models.critic.values(part)
        part = with_advantages(part, values, models.algorithm.config, models.policy.replicas)
        models.critic.begin_updates(part)
    elif ALGORITHMS[models.algorithm.config.name].whitened:
        part = with_whitened(part, models.algorithm.config, models.policy.replicas)
    return part, measured


MEANS_OVER_UPDATES = ("entropy", "clip_fraction", "ratio_mean", "reference_kl_k3")
"""Statistics that are means over the tokens of all updates."""
ONCE_PER_TOKEN = (
    "logprob_error_max",
    "behaviour_kl_k3",
    "importance_mean",
    "importance_max",
    "importance_capped",
    "importance_rejected",
    "importance_ess",
    "behaviour_clip_fraction",
    "mismatch",
    "mismatch_mean",
    "mismatch_max",
    "token_mult_prob_error",
)
"""Statistics that compare the start policy with the engine's policy, once for each token."""
JOINED: dict[str, Callable[[Any], Any]] = {
    "micro_batches": sum,
    "computed_tokens": sum,
    "loss_scale_repeats": sum,
    "memory_peak_gb": max,
    "memory_expected_gb": max,
    "expert_load_max": max,
    "expert_load_min": min,
    "loss_scale": min,
}
"""Statistics with a merge rule other than the mean over the updates."""


def merged_updates(
    config: AlgorithmConfig, updates: Sequence[StepStats], schedule: UpdateSchedule
) -> StepStats:
    """Return the statistics of a step from the statistics of its updates.

    Args:
        config: section `[algorithm]`.
        updates: statistics of each update, in order.
        schedule: scheduled updates of the step.
    """
    made = [update for update in updates if not update.skipped]
    counts: dict[str, Any] = {"updates": len(made), "updates_skipped": len(updates) - len(made)}
    if len(updates) == 1:
        return msgspec.structs.replace(updates[0], **counts)
    found = {
        field.name: _joined(JOINED.get(field.name, _mean), made or updates, field.name)
        for field in msgspec.structs.fields(StepStats)
        if field.type in (float | None, int | None)
    }
    if any(update.sums for update in updates):
        found |= _measured(config, updates, schedule)
    warnings = dict.fromkeys(text for update in updates for text in update.warnings)
    return StepStats(
        **found
        | counts
        | {
            "trained_tokens": sum(totals.trained_tokens for totals in schedule.mini_batches),
            "skipped": "" if made else updates[0].skipped,
            "warnings": (*warnings, *_skip_warnings(updates, made)),
        }
    )


def _measured(
    config: AlgorithmConfig, updates: Sequence[StepStats], schedule: UpdateSchedule
) -> dict[str, Any]:
    """Return the merged statistics of the updates' sums.

    With log-probabilities from the start of the step, the whole first epoch is compared with the engine.
    Without, only updates up to the first that trains a token are compared: until then, the policy is
    unchanged.
    """
    trained = [update.trained_tokens > 0 for update in updates]
    first = len(schedule.mini_batches) if schedule.start_logprobs else trained.index(True) + 1
    once, whole = (_token_stats(config, updates[:count], schedule) for count in (first, len(updates)))
    return {name: getattr(once, name) for name in ONCE_PER_TOKEN} | {
        name: getattr(whole, name) for name in MEANS_OVER_UPDATES
    }


def _token_stats(
    config: AlgorithmConfig, updates: Sequence[StepStats], schedule: UpdateSchedule
) -> StepStats:
    """Return the statistics over the tokens of several updates."""
    totals = [schedule.mini_batches[number] for number in schedule.updates[: len(updates)]]
    measures = StepMeasures(
        config=config,
        tokens=sum(update.trained_tokens for update in updates),
        lags=totals[0].lag_max + 1,
        truncates=any(update.importance_capped is not None for update in updates),
        refers=any(update.reference_kl_k3 is not None for update in updates),
        fresh=any(part.fresh for part in totals),
        rejects=any(update.importance_rejected is not None for update in updates),
    )
    vectors = [torch.tensor(update.sums, dtype=torch.float64) for update in updates if update.sums]
    return measures.stats(measures.join(vectors, torch.device("cpu")), grad_norm=0.0, skipped="")


def _joined(join: Callable[[Any], Any], updates: Sequence[StepStats], name: str) -> Any:
    values = [value for update in updates if (value := getattr(update, name)) is not None]
    return join(values) if values else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _skip_warnings(updates: Sequence[StepStats], applied: Sequence[StepStats]) -> tuple[str, ...]:
    """Return a warning if the step changed weights but skipped some updates."""
    skipped = [update.skipped for update in updates if update.skipped]
    if not skipped or not applied:
        return ()
    return (f"{len(skipped)} of {len(updates)} updates were skipped, the last one because {skipped[-1]}",)

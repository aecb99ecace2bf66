"""Makes the updates of a step with all models of this rank."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from trainer.algorithms.registry import ALGORITHMS
from trainer.backends.base import NOTHING_TRAINED, StepStats
from trainer.batch import Batch
from trainer.functional.corrections import leaves_region, log_ratio_limit
from trainer.ranks.collectives import concatenate_replicas
from trainer.roles.advantages import with_advantages, with_whitened
from trainer.roles.models import RankModels
from trainer.roles.token_rewards import with_frozen
from trainer.step.merged_updates import merged_updates
from trainer.step.train_command import UpdateSchedule


def make_updates(models: RankModels, part: Batch, schedule: UpdateSchedule) -> StepStats:
    """Make the updates of a step, after the passes of the models that do not change in it. A collective.

    However many updates it makes, the step is one version.

    Args:
        models: this rank's parts.
        part: the samples of this rank's replica.
        schedule: the updates.

    Returns:
        The statistics of the step, equal on every rank.
    """
    part, measured = _with_roles(models, part, schedule)
    updates = []
    for batch in batches_of(part, schedule):
        if schedule.second_moment_threshold:
            batch = _within_moment(models, batch, schedule.second_moment_threshold)
        updates.append(dataclasses.replace(_update(models, batch), **measured))
    if models.entropy is not None:
        models.entropy.note(updates)
    return merged_updates(models.algorithm.config, updates, schedule)


def batches_of(part: Batch, schedule: UpdateSchedule) -> Iterator[Batch]:
    """Yield a replica's part of each update, one at a time."""
    if not schedule.mini_batches:
        yield part
        return
    for number in schedule.updates:
        yield part.select_mini_batch(number, schedule.mini_batches[number])


def _update(models: RankModels, batch: Batch) -> StepStats:
    """Make an update of every model that is trained, on this replica's part of a mini-batch.

    The first steps of a run may train the critic alone.
    """
    critic, tokens = models.critic, batch.totals.trained_tokens
    stats = StepStats(tokens, skipped="" if tokens else NOTHING_TRAINED)
    if critic is None or batch.step >= critic.config.critic_warmup_steps:
        stats = models.policy.train_step(batch)
    if critic is not None:
        stats = critic.train_step(batch).added_to(stats)
    return dataclasses.replace(stats, entropy_coef=batch.entropy_coef)


def _within_moment(models: RankModels, batch: Batch, budget: float) -> Batch:
    """Return the batch of an update with the clip that M2PO's trust region gives it. A collective."""
    moved = (models.policy.logprobs(batch) - batch.behaviour_logprobs)[batch.loss_mask]
    leaving = moved[leaves_region(moved, batch.advantages[batch.loss_mask])]
    everywhere = concatenate_replicas(leaving.square(), models.policy.replicas)
    return dataclasses.replace(batch, log_ratio_limit=log_ratio_limit(everywhere, budget))


def _with_roles(models: RankModels, part: Batch, schedule: UpdateSchedule) -> tuple[Batch, dict[str, Any]]:
    """Return the part with what other models and the start of the step say, and what was measured of it."""
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

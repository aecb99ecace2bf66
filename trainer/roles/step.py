"""Makes the step of one batch with all models of this rank."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from trainer.algorithms.registry import WHITENED
from trainer.backends.base import NOTHING_TRAINED, StepStats
from trainer.backends.rank_commands import StepCommand, of_all_replicas
from trainer.batch import Batch
from trainer.functional.corrections import leaves_region, log_ratio_limit
from trainer.roles.advantages import with_advantages, with_whitened
from trainer.roles.models import RankModels
from trainer.roles.token_rewards import with_frozen


def run_step(models: RankModels, part: Batch, command: StepCommand) -> list[StepStats]:
    """Add to the batch what models that do not change in it say of its tokens, then make its updates.

    Called on every rank, with the part of its replica. However many updates it makes, the step is one
    version.

    Returns:
        What each update measured, in order.
    """
    part, measured = _with_roles(models, part, command)
    made = []
    for batch in _batches(part, command):
        if command.second_moment_threshold:
            batch = _within_moment(models, batch, command.second_moment_threshold)
        made.append(dataclasses.replace(_update(models, batch), **measured))
    if models.entropy is not None:
        models.entropy.note(made)
    return made


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
    everywhere = of_all_replicas(leaving.square(), models.policy.replicas)
    return dataclasses.replace(batch, log_ratio_limit=log_ratio_limit(everywhere, budget))


def _batches(part: Batch, command: StepCommand) -> Iterator[Batch]:
    """Yield what each update trains, one at a time."""
    if not command.mini_batches:
        yield part
        return
    for number in command.updates:
        yield part.select_mini_batch(number, command.mini_batches[number])


def _with_roles(models: RankModels, part: Batch, command: StepCommand) -> tuple[Batch, dict[str, Any]]:
    """Return the part with what other models and the start of the step say, and what was measured of it."""
    found: dict[str, Any] = {}
    if command.start_logprobs:
        found["start_logprobs"] = models.policy.logprobs(part)
    if models.entropy is not None:
        found["entropy_coef"] = models.entropy.bonus.in_force
    part = dataclasses.replace(part, **found)
    part, measured = with_frozen(part, models.policy, models.frozen, reference=command.reference_logprobs)
    if models.critic is not None:
        values = models.critic.values(part)
        part = with_advantages(part, values, models.algorithm, models.policy.replicas)
    elif models.algorithm.name in WHITENED:
        part = with_whitened(part, models.algorithm, models.policy.replicas)
    return part, measured

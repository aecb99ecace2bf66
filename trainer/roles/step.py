"""Makes the step of one batch with all models of this rank."""

import dataclasses

from trainer.backends.base import StepStats
from trainer.backends.rank_commands import StepCommand
from trainer.batch import Batch
from trainer.roles.models import RankModels


def run_step(models: RankModels, part: Batch, command: StepCommand) -> list[StepStats]:
    """Add to the batch what models that do not change in it say of its tokens, then make its updates.

    Called on every rank, with the part of its replica. However many updates it makes, the step is one
    version.

    Returns:
        What each update measured, in order.
    """
    part = _with_roles(models, part, command)
    return [_update(models, batch) for batch in _batches(part, command)]


def _update(models: RankModels, batch: Batch) -> StepStats:
    """Make an update of every model that is trained, on this replica's part of a mini-batch."""
    return models.policy.train_step(batch)


def _batches(part: Batch, command: StepCommand) -> list[Batch]:
    """Return what each update trains."""
    if not command.mini_batches:
        return [part]
    by_number = [part.of_mini_batch(number, totals) for number, totals in enumerate(command.mini_batches)]
    return [by_number[number] for number in command.updates]


def _with_roles(models: RankModels, part: Batch, command: StepCommand) -> Batch:
    found = {}
    if command.start_logprobs:
        found["start_logprobs"] = models.policy.logprobs(part)
    if command.reference_logprobs:
        found["reference_logprobs"] = models.policy.reference_logprobs(part)
    return dataclasses.replace(part, **found)

"""Makes the step of one batch with all models of this rank."""

import dataclasses

from trainer.backends.base import StepStats
from trainer.backends.rank_commands import StepCommand
from trainer.batch import Batch
from trainer.roles.models import RankModels


def run_step(models: RankModels, part: Batch, command: StepCommand) -> StepStats:
    """Add to the batch what models that do not change in it say of its tokens, then train on it.

    Called on every rank, with the part of its replica.
    """
    return models.policy.train_step(_with_roles(models, part, command))


def _with_roles(models: RankModels, part: Batch, command: StepCommand) -> Batch:
    if command.reference_logprobs:
        part = dataclasses.replace(part, reference_logprobs=models.policy.reference_logprobs(part))
    return part

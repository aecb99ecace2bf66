"""Builds a rank's models, and the command of a step, from the settings of a run."""

from collections.abc import Sequence

from protocol.device.shared_layout import TRANSPORT
from services.ledger.interface import Taken
from services.settings.hub import fetch_model
from services.settings.sections import Settings
from trainer.algorithms.registry import make_algorithm
from trainer.backends.base import Backend
from trainer.backends.rank_commands import TrainCommand
from trainer.registry import make_backend
from trainer.roles.entropy import EntropyControl
from trainer.roles.models import RankModels


def build_models(settings: Settings) -> RankModels:
    """Return this rank's parts of the run's models, loaded."""
    control = EntropyControl(settings.algorithm) if settings.algorithm.entropy_target else None
    return RankModels(build_backend(settings), entropy=control)


def build_backend(settings: Settings) -> Backend:
    """Return this rank's part of the policy, loaded."""
    return make_backend(
        fetch_model(settings),
        parallel=settings.parallel,
        optimizer=settings.optimizer,
        trainer=settings.trainer,
        algorithm=make_algorithm(settings.algorithm),
        adapters=settings.lora,
        shared=settings.weights.transport == TRANSPORT,
    )


def train_command(
    settings: Settings, taken: Taken, records: Sequence[bytes], *, mask_late: bool = True
) -> TrainCommand:
    """Return the command that trains on a taken batch.

    Args:
        settings: those of the run.
        taken: step and groups of the batch.
        records: encoded `ScoredRollout` of each group, in the order of `taken.groups`.
        mask_late: whether tokens over the bound are masked; else one is an error.
    """
    return TrainCommand(
        step=taken.step,
        records=list(records),
        bounds=[group.max_staleness for group in taken.groups],
        mask_late=mask_late,
        temperature=settings.sampling.temperature or 1.0,
        recompute_logprobs=settings.trainer.recompute_logprobs,
        reference_logprobs=settings.algorithm.kl_coef > 0,
        mismatch_share=settings.trainer.mismatch_share,
        epochs=settings.trainer.epochs_per_batch,
        mini_batches=settings.trainer.num_mini_batches,
        seed=settings.trainer.seed,
        max_tokens=settings.sampling.max_tokens,
    )

"""Builds a rank's models, and the command of a step, from the settings of a run."""

from collections.abc import Sequence

from protocol.device.shared_layout import TRANSPORT
from services.ledger.interface import Taken
from services.runtime.user_modules import add_user_modules
from services.settings.hub import fetch_critic, fetch_frozen, fetch_model
from services.settings.sections import Settings
from trainer.algorithms.registry import ALGORITHMS, make_algorithm
from trainer.backends.base import Backend, FrozenSpec
from trainer.registry import make_backend, make_critic
from trainer.roles.critic import Critic
from trainer.roles.entropy import EntropyControl
from trainer.roles.frozen import FrozenModels, FrozenRole
from trainer.roles.models import RankModels
from trainer.step.train_command import TrainCommand


def build_models(settings: Settings) -> RankModels:
    """Return this rank's parts of the run's models, loaded."""
    add_user_modules(settings)
    policy, algorithm = build_backend(settings), make_algorithm(settings.algorithm)
    control = EntropyControl(settings.algorithm) if settings.algorithm.entropy_target else None
    roles = {
        spec.role: FrozenRole(policy.load_frozen(spec), policy.device, offload=spec.offload)
        for spec in frozen_specs(settings)
    }
    return RankModels(
        policy,
        entropy=control,
        frozen=FrozenModels(**roles),
        critic=_critic(settings, policy),
        algorithm=algorithm,
    )


def frozen_specs(settings: Settings) -> tuple[FrozenSpec, ...]:
    """Return the models of a run that are not trained; models of the hub are fetched unless they are here.

    Raises:
        SettingsError: as `fetch_frozen`.
    """
    return tuple(
        FrozenSpec(role, directory, getattr(settings, role).offload)
        for role, directory in fetch_frozen(settings).items()
    )


def _critic(settings: Settings, policy: Backend) -> Critic | None:
    """Return this rank's part of the critic, loaded, if the algorithm needs one."""
    if not settings.needs_critic:
        return None
    return make_critic(
        policy,
        fetch_critic(settings),
        optimizer=settings.optimizer,
        trainer=settings.trainer,
        config=settings.critic,
    )


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
        frozen=frozen_specs(settings),
        critic_dir=fetch_critic(settings) if settings.needs_critic else None,
    )


def train_command(
    settings: Settings, batch: Taken, records: Sequence[bytes], *, mask_late: bool = True
) -> TrainCommand:
    """Return the command that trains on a taken batch.

    Args:
        settings: the run's settings.
        batch: step and groups of the batch.
        records: encoded `ScoredRollout` of each group, in the order of `batch.groups`.
        mask_late: whether tokens over the bound are masked; else one is an error.
    """
    return TrainCommand(
        step=batch.step,
        records=list(records),
        bounds=[group.max_staleness for group in batch.groups],
        mask_late=mask_late,
        temperature=settings.sampling.temperature or 1.0,
        recompute_logprobs=settings.trainer.recompute_logprobs,
        reference_logprobs=settings.algorithm.kl_coef > 0,
        mismatch_share=0.0
        if ALGORITHMS[settings.algorithm.name].on_data
        else settings.trainer.mismatch_share,
        epochs=settings.trainer.epochs_per_batch,
        mini_batches=settings.trainer.num_mini_batches,
        seed=settings.trainer.seed,
        max_tokens=settings.sampling.max_tokens,
    )

"""Backends by name."""

from pathlib import Path

from protocol.choices import checked_name
from protocol.errors import SettingsError
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from trainer.algorithms.base import Algorithm
from trainer.backends.base import Backend
from trainer.config import BACKENDS, OptimizerConfig, ParallelConfig, TrainerConfig


def make_backend(
    model_dir: Path,
    *,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    trainer: TrainerConfig,
    algorithm: Algorithm,
    adapters: LoraConfig = NO_ADAPTERS,
    shared: bool = False,
) -> Backend:
    """This rank's part of the backend that `trainer.backend` names. Called on every rank.

    A backend's libraries are imported only if it is asked for. `shared`: it is to compute with an engine's
    live weights.

    Raises:
        SettingsError: if there is none of that name, or it cannot work with these settings.
    """
    if checked_name(trainer.backend, BACKENDS, "setting trainer.backend:") == "megatron":
        from trainer.megatron.backend import MegatronBackend

        return MegatronBackend(
            model_dir,
            parallel=parallel,
            optimizer=optimizer,
            trainer=trainer,
            algorithm=algorithm,
            adapters=adapters,
            shared=shared,
        )
    if parallel.world_size != 1:
        raise SettingsError(
            f"the {trainer.backend} backend runs on one rank, [parallel] asks for {parallel.world_size}: use megatron"
        )
    if trainer.backend == "reference":
        from trainer.reference.backend import ReferenceBackend

        return ReferenceBackend(
            model_dir,
            optimizer=optimizer,
            trainer=trainer,
            algorithm=algorithm,
            adapters=adapters,
            shared=shared,
        )
    from trainer.backends.scripted import ScriptedBackend

    return ScriptedBackend(trainer=trainer, algorithm=algorithm)

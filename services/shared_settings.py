"""Which settings go with `weights.transport = "shared"`: one engine and one trainer that compute with the same tensors on one device."""

from typing import TYPE_CHECKING

from protocol.errors import SettingsError
from protocol.transfer.shared_weights import TRANSPORT
from rollout.engines.registry import CAN_SHARE
from services.placement import listed
from trainer.config import WeightConfig

if TYPE_CHECKING:
    from services.settings import Settings


def check_shared(settings: "Settings") -> None:
    """Nothing to do with another transport.

    Raises:
        SettingsError: the first setting that does not go with it, and what it has to be.
    """
    if settings.weights.transport != TRANSPORT:
        return
    trainer, engine, services = settings.trainer, settings.engine, settings.services
    gpus = (listed(services.trainer_gpus), listed(services.rollout_gpus))
    wants = CAN_SHARE.get(engine.name)
    wrong = {
        f"engine.name is {engine.name!r}; it has to be {' or '.join(CAN_SHARE)}": wants is None,
        f"trainer.backend is {trainer.backend!r}; with engine.name {engine.name!r} it has to be {wants!r}": trainer.backend != wants,
        f"[parallel] asks for {settings.parallel.world_size} ranks; the trainer has to be one": settings.parallel.world_size != 1,
        f"engine.tensor_parallel_size is {engine.tensor_parallel_size}; it has to be 1": engine.tensor_parallel_size != 1,
        "engine.enable_sleep_mode is true; the trainer computes with the engine's memory": engine.enable_sleep_mode,
        f"services.rollouts is {services.rollouts}; there can be one rollout worker": services.rollouts > 1,
        "services.pool names rollout workers; there can be one, on [engine]": bool(services.pool),
        f"lora.rank is {settings.lora.rank}; adapters are not shared": settings.lora.rank > 0,
        "colocated.enabled is true; who shares tensors does not take turns": settings.colocated.enabled,
        f"trainer.dtype is {trainer.dtype}, engine.dtype {engine.dtype}; they have to be the same": trainer.dtype != engine.dtype,
        f"services.trainer_gpus is {services.trainer_gpus!r}, services.rollout_gpus {services.rollout_gpus!r}; they have to name the same "
        "GPU": gpus[0][:1] != gpus[1][:1],
    }
    for said, is_wrong in wrong.items():
        if is_wrong:
            raise SettingsError(f"setting weights.transport: with {TRANSPORT!r}, {said}")


def check_workers(weights: WeightConfig, rollouts: int) -> None:
    """Before the number of rollout workers of a running `tether up` is changed. Raises SettingsError."""
    if weights.transport == TRANSPORT and rollouts > 1:
        raise SettingsError(f"rollouts={rollouts}: with weights.transport {TRANSPORT!r} there can be one rollout worker")

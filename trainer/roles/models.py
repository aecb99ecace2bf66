"""Contains a rank's shards of all models of a run."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from protocol.errors import SettingsError
from trainer.algorithms.base import Algorithm
from trainer.algorithms.registry import make_algorithm
from trainer.backends.base import Backend, FrozenModel
from trainer.backends.host_offload import HostOffload
from trainer.batch import Batch
from trainer.config import AlgorithmConfig
from trainer.ranks.collectives import is_rank_0
from trainer.roles.critic import Critic
from trainer.roles.drafts import DraftTraining
from trainer.roles.entropy import EntropyControl
from trainer.roles.remote import NO_LINKS, RemoteFrozenModel, RoleLink
from trainer.storage.host_state import HostState


class LocalFrozenModel:
    """A frozen model, optionally offloaded between its passes."""

    def __init__(self, model: FrozenModel, device: torch.device, *, offload: bool) -> None:
        """Wrap a loaded model; with `offload`, the model is on the device only during its passes."""
        self._model, self._rests_on_host = model, offload
        self._host = HostOffload(device)
        if offload:
            self.offload()

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Return this model's numbers for the batch's tokens, float32 [t] on the CPU; see `FrozenModel`."""
        self._host.onload()
        found = self._model.evaluate(batch)
        if self._rests_on_host:
            self.offload()
        return found

    def offload(self) -> None:
        """Move the model to the host."""
        if not self._host.in_use:
            self._host.offload(self._model.tensors)

    def onload(self) -> None:
        """Move the model back to the device, unless it stays on the host between passes."""
        if not self._rests_on_host:
            self._host.onload()


@dataclass(frozen=True, slots=True)
class FrozenModels:
    """Frozen models of a run."""

    reference: LocalFrozenModel | RemoteFrozenModel | None = None
    """None: the policy's backend keeps the reference model."""
    teacher: LocalFrozenModel | RemoteFrozenModel | None = None
    reward_model: LocalFrozenModel | RemoteFrozenModel | None = None
    reward_weight: float = 1.0
    """Weight of the reward model's scores."""

    @property
    def roles(self) -> tuple[LocalFrozenModel | RemoteFrozenModel, ...]:
        """Models that are set."""
        given = self.reference, self.teacher, self.reward_model
        return tuple(role for role in given if role is not None)

    def reference_logprobs(self, policy: Backend, part: Batch) -> torch.Tensor:
        """Return a part's log-probabilities under the reference model."""
        return self.reference.evaluate(part) if self.reference else policy.reference_logprobs(part)


NO_FROZEN = FrozenModels()


log = logging.getLogger("tether.trainer")

CRITIC = "critic"
"""Directory of the critic's shards in a checkpoint."""


@dataclass(frozen=True, slots=True)
class RankModels:
    """A rank's shard of each model, by role.

    Every rank calls every method in the same order (collectives inside).
    """

    policy: Backend
    """Model that is trained and published."""
    entropy: EntropyControl | None = None
    """Adaptive entropy bonus; None: constant, as in the settings."""
    frozen: FrozenModels = NO_FROZEN
    """Frozen models."""
    critic: Critic | None = None
    """Critic that estimates advantages; None: not needed."""
    algorithm: Algorithm = field(default_factory=lambda: make_algorithm(AlgorithmConfig()))
    """Advantages, loss and weights of a step."""
    drafts: DraftTraining | None = None
    """Draft head published with the policy; None: no draft head."""
    links: Mapping[str, RoleLink] = field(default_factory=lambda: NO_LINKS)
    """On rank 0: role with ranks of its own -> connection."""

    def copy_state(self) -> HostState:
        """Return this rank's shard of a checkpoint, copied to host memory; valid until the next call."""
        state = self.policy.copy_state()
        if self.entropy is not None and is_rank_0():
            state = self.entropy.added_to(state)
        if self.critic is not None:
            state = replace(state, parts={CRITIC: self.critic.copy_state()})
        if self.drafts is not None:
            state = replace(state, parts={**state.parts, **self.drafts.copy_parts()})
        return state

    def finish_save(self) -> str:
        """Wait until models on ranks of their own have written their shards of a checkpoint."""
        return self.critic.finish_save() if self.critic is not None else ""

    def restore(self, directory: Path) -> None:
        """Load this rank's shard of a checkpoint.

        Raises:
            SettingsError: as `Backend.restore`, `EntropyControl.restore`, `DraftTraining.restore_parts` and,
                with a critic, `critic_directory`.
        """
        if self.critic is not None:
            self.critic.restore(critic_directory(directory))
        elif (directory / CRITIC).is_dir():
            log.warning("checkpoint.critic_left_out directory=%s", directory)
        if self.entropy is not None:
            self.entropy.restore(directory)
        if self.drafts is not None:
            self.drafts.restore_parts(directory)
        self.policy.restore(directory)

    def keep_reference(self) -> None:
        """Keep the policy's current weights as the reference model, unless that is a model of its own."""
        if self.frozen.reference is None:
            self.policy.keep_reference()

    def offload(self) -> None:
        """Move everything on the device to the host."""
        for model in (*self._trained(), *self.frozen.roles):
            model.offload()

    def onload(self) -> None:
        """Move what `offload` moved back to the device."""
        for model in (*self._trained(), *self.frozen.roles):
            model.onload()

    def close(self) -> None:
        """Release the models; idempotent."""
        for model in reversed(list(self._trained())):
            model.close()

    def _trained(self) -> Iterator[Backend | Critic]:
        yield self.policy
        if self.critic is not None:
            yield self.critic


def critic_directory(checkpoint: Path) -> Path:
    """Return the directory of the critic's shards in a checkpoint.

    Raises:
        SettingsError: the checkpoint has no critic.
    """
    if not (checkpoint / CRITIC).is_dir():
        raise SettingsError(
            f"checkpoint {checkpoint} has no critic: it was made with an algorithm.name that needs none; "
            "continue with that one, or begin a new run from its export"
        )
    return checkpoint / CRITIC

"""Uses, on the policy's ranks, a critic that has ranks of its own.

Rank 0 of the policy gets the critic's values, sends it the returns that are made of them, and gets what each
update measured. Both models make an update at the same time.
"""

from pathlib import Path

import msgspec
import torch

from protocol.errors import SettingsError
from trainer.backends.base import Replicas
from trainer.batch import Batch
from trainer.ranks.collectives import concatenate_replicas, divide_over_replicas
from trainer.ranks.messages import broadcast_message, next_message
from trainer.roles.config import CriticConfig
from trainer.roles.critic import Critic, CriticStats
from trainer.roles.placed import RoleLink
from trainer.storage.host_state import HostState

_stats = msgspec.msgpack.Decoder(CriticStats)
_reason = msgspec.msgpack.Decoder(str)


class PlacedCritic(Critic):
    """A critic that has ranks of its own, as each rank of the policy uses it.

    Its ranks carry out the commands by themselves (`CriticFollower`).
    """

    def __init__(self, link: RoleLink | None, policy: Replicas, config: CriticConfig) -> None:
        """Use a critic by rank 0's link.

        Args:
            link: on rank 0.
            policy: ranks of each replica of the policy.
            config: settings of the critic.
        """
        self.config, self._link, self._policy = config, link, policy

    def values(self, batch: Batch) -> torch.Tensor:
        whole = self._link.receive_rows() if self._link is not None else None
        return divide_over_replicas(whole, len(batch.tokens), self._policy)

    def begin_updates(self, part: Batch) -> None:
        """Send the returns to the critic's ranks, which begin the updates of the step. A collective."""
        if part.returns is None:
            raise RuntimeError("a critic's updates need returns")
        whole = concatenate_replicas(part.returns, self._policy)
        if self._link is not None:
            self._link.send_rows(whole)

    def train_step(self, batch: Batch) -> CriticStats:
        """Wait for the measurements of the critic's next update."""
        return _stats.decode(self._message())

    def copy_state(self) -> HostState:
        """Return an empty part: the critic's ranks write theirs."""
        return HostState({})

    def finish_save(self) -> str:
        return _reason.decode(self._message())

    def restore(self, directory: Path) -> None:
        """Wait until the critic's ranks have loaded it; as `Critic.restore`."""
        if why := _reason.decode(self._message()):
            raise SettingsError(why)

    def offload(self) -> int:
        """Leave the model where it is: its devices are its own."""
        return 0

    def onload(self) -> None:
        """Leave the model where it is."""

    def close(self) -> None:
        """Leave the model to its ranks, which close it when they get the command to exit."""

    def _message(self) -> bytes:
        """Wait for a message of the critic's rank 0, on every rank of the policy. A collective."""
        if self._link is None:
            return next_message()
        data = self._link.receive_message()
        broadcast_message(data)
        return data

"""Uses a model on ranks of its own from the policy's ranks.

Rank 0 of the policy sends each replica of the other model its part of a step. It distributes the results to
the policy's replicas, which divide the step differently. Shapes: N rows of the step, T tokens of all rows.

From a critic, rank 0 receives the values, sends the returns computed from the values, and receives the
measurements of each update. Policy and critic are updated at the same time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec
import torch

from protocol.errors import SettingsError
from trainer.backends.base import Replicas, StepStats
from trainer.batch import Batch
from trainer.ranks.collectives import (
    broadcast_message,
    concatenate_replicas,
    divide_over_replicas,
    next_message,
)
from trainer.ranks.wire import BetweenModels, receive_bytes, send_bytes, send_part
from trainer.roles.config import CriticConfig
from trainer.roles.critic import Critic
from trainer.storage.host_state import HostState

_ranks = msgspec.msgpack.Decoder(list[list[int]])


@dataclass(frozen=True, slots=True)
class StepDivision:
    """Division of a step between the replicas of two models."""

    lengths: Sequence[int]
    """[N], number of tokens in each row."""
    policy_rows: Sequence[Sequence[int]]
    """Rows of each replica of the policy."""
    remote_rows: Sequence[Sequence[int]]
    """Rows of each replica of the other model."""

    def entries(self, replica: int) -> int:
        """Return the number of tokens of a replica of the other model."""
        return sum(self.lengths[row] for row in self.remote_rows[replica])

    def to_policy(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Reorder values from the other model's replicas to the order of the policy's: float32 [T]."""
        by_row = self._by_row(torch.cat(list(values)), self.remote_rows)
        return torch.cat([by_row[row] for row in chain(*self.policy_rows)])

    def to_remote(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Split values in the order of the policy's replicas, float32 [T], by replica of the other model.

        The inverse of `to_policy`.
        """
        by_row = self._by_row(values, self.policy_rows)
        return [torch.cat([values[:0], *(by_row[row] for row in rows)]) for rows in self.remote_rows]

    def _by_row(self, values: torch.Tensor, replicas: Sequence[Sequence[int]]) -> Mapping[int, torch.Tensor]:
        """Return the values of each row, given the concatenated values of a model's replicas."""
        rows = list(chain(*replicas))
        return dict(zip(rows, values.split([self.lengths[row] for row in rows]), strict=True))


class RoleLink:
    """Connection of rank 0 to the ranks of another model. One thread calls all methods."""

    def __init__(self, wire: BetweenModels) -> None:
        """Wrap a connection; call `await_ready` next."""
        self._wire = wire
        self._division = StepDivision((), (), ())
        """Division of the last step."""
        self.replicas: Replicas = ()
        """Ranks of each replica of the model."""

    def await_ready(self) -> None:
        """Wait until the model is loaded."""
        self.replicas = _ranks.decode(receive_bytes(self._wire, 1))

    def send_command(self, data: bytes) -> None:
        """Send a command to each rank of the model."""
        for rank in self._wire.others:
            send_bytes(self._wire, data, rank)

    def send_step(self, parts: Sequence[Batch], division: StepDivision) -> None:
        """Send each replica its part of a step, after the step's command."""
        for ranks, part in zip(self.replicas, parts, strict=True):
            send_part(part, [rank + 1 for rank in ranks], self._wire)
        self._division = division

    def receive_rows(self) -> torch.Tensor:
        """Wait for a value of each token of the step, in the order of the policy's replicas: float32 [T]."""
        return self._division.to_policy(
            [
                self._wire.receive(self._division.entries(replica), torch.float32, ranks[0] + 1)
                for replica, ranks in enumerate(self.replicas)
            ]
        )

    def send_rows(self, values: torch.Tensor) -> None:
        """Send each rank its replica's part of values in the policy's order, float32 [T]."""
        parts = self._division.to_remote(values)
        for ranks, part in zip(self.replicas, parts, strict=True):
            for rank in ranks:
                self._wire.send(part, rank + 1)

    def receive_message(self) -> bytes:
        """Wait for a message of the model's rank 0."""
        return receive_bytes(self._wire, 1)


NO_LINKS: Mapping[str, RoleLink] = {}


class RemoteFrozenModel:
    """Frozen model on ranks of its own, as seen from a rank of the policy."""

    def __init__(self, link: RoleLink | None, policy_replicas: Replicas) -> None:
        """Use rank 0's connection to the model.

        Args:
            link: on rank 0; None on other ranks.
            policy_replicas: ranks of each replica of the policy.
        """
        self._link, self._policy_replicas = link, policy_replicas

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Return this model's numbers for the batch's tokens, float32 [t] on the CPU. A collective."""
        whole = self._link.receive_rows() if self._link is not None else None
        return divide_over_replicas(whole, len(batch.tokens), self._policy_replicas)

    def offload(self) -> None:
        """Return at once: the model has a device of its own."""

    def onload(self) -> None:
        """Return at once: the model was not offloaded."""


_stats = msgspec.msgpack.Decoder(StepStats)
_reason = msgspec.msgpack.Decoder(str)


class RemoteCritic(Critic):
    """Critic on ranks of its own, as seen from a rank of the policy.

    The critic's ranks execute the commands themselves (`CriticFollower`).
    """

    def __init__(self, link: RoleLink | None, policy_replicas: Replicas, config: CriticConfig) -> None:
        """Use rank 0's connection to the critic.

        Args:
            link: on rank 0; None on other ranks.
            policy_replicas: ranks of each replica of the policy.
        """
        self.config, self._link, self._policy_replicas = config, link, policy_replicas

    def values(self, batch: Batch) -> torch.Tensor:
        whole = self._link.receive_rows() if self._link is not None else None
        return divide_over_replicas(whole, len(batch.tokens), self._policy_replicas)

    def begin_updates(self, part: Batch) -> None:
        """Send the returns to the critic's ranks, which then begin the updates of the step. A collective."""
        if part.returns is None:
            raise RuntimeError("a critic's updates need returns")
        whole = concatenate_replicas(part.returns, self._policy_replicas)
        if self._link is not None:
            self._link.send_rows(whole)

    def train_step(self, batch: Batch) -> StepStats:
        """Wait for the measurements of the critic's next update."""
        return _stats.decode(self._message())

    def copy_state(self) -> HostState:
        """Return an empty shard: the critic's ranks write their own."""
        return HostState({})

    def finish_save(self) -> str:
        return _reason.decode(self._message())

    def restore(self, directory: Path) -> None:
        """Wait until the critic's ranks have loaded the checkpoint; as `Critic.restore`."""
        if why := _reason.decode(self._message()):
            raise SettingsError(why)

    def offload(self) -> int:
        """Return at once: the model has devices of its own."""
        return 0

    def onload(self) -> None:
        """Return at once: the model was not offloaded."""

    def close(self) -> None:
        """Return at once: the critic's ranks close the model on the exit command."""

    def _message(self) -> bytes:
        """Wait for a message of the critic's rank 0, on every rank of the policy. A collective."""
        if self._link is None:
            return next_message()
        data = self._link.receive_message()
        broadcast_message(data)
        return data

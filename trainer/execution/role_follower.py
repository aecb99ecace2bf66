"""Carries out the commands of rank 0 on a rank of a model that is apart from the policy."""

import msgspec
import torch

from trainer.backends.base import FrozenModel, Replicas
from trainer.execution.commands import ExitCommand, StepCommand, decode_command
from trainer.ranks.scatter_batch import receive_part
from trainer.ranks.wire import BetweenModels, receive_bytes, send_bytes


class RoleSeat:
    """The other end of a `RoleLink`: one rank of the model."""

    def __init__(self, wire: BetweenModels, rank: int, replicas: Replicas) -> None:
        """Take over a connection.

        Args:
            wire: leads to rank 0 of the policy.
            rank: of this process, among the model's.
            replicas: ranks of each replica of the model.
        """
        self.wire, self._rank, self._replicas = wire, rank, replicas

    def say_ready(self) -> None:
        """Say that the model is loaded, from rank 0."""
        self.send_message(msgspec.msgpack.encode([list(ranks) for ranks in self._replicas]))

    def send_rows(self, values: torch.Tensor) -> None:
        """Send a value of each token of this replica's part, float32 [t], from the replica's first rank."""
        if any(ranks[0] == self._rank for ranks in self._replicas):
            self.wire.send(values, 0)

    def receive_rows(self, entries: int) -> torch.Tensor:
        """Wait for a value of each token of this replica's part: float32 [entries]."""
        return self.wire.receive(entries, torch.float32)

    def send_message(self, data: bytes) -> None:
        """Send a message, which is not empty, from the model's rank 0."""
        if self._rank == 0:
            send_bytes(self.wire, data, 0)


class FrozenFollower:
    """A rank of a model that is never trained: it computes the log-probabilities of each step."""

    def __init__(self, role: str, model: FrozenModel, seat: RoleSeat) -> None:
        """Take over a loaded model, and tell rank 0.

        Args:
            role: the model's section in the settings.
            model: this rank's part.
            seat: the way to rank 0 and back.
        """
        self._role, self._model, self._seat = role, model, seat
        seat.say_ready()

    def follow(self) -> None:
        """Compute with each step, until rank 0 says exit; other commands are not for this model."""
        while not isinstance(command := decode_command(receive_bytes(self._seat.wire)), ExitCommand):
            if isinstance(command, StepCommand):
                self._step(command)

    def _step(self, command: StepCommand) -> None:
        part = receive_part(self._seat.wire)
        if self._role != "reference" or command.schedule.reference_logprobs:
            self._seat.send_rows(self._model.logprobs(part))

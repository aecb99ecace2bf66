"""Executes rank 0's commands on a remote rank, of a frozen model or a critic outside the policy's ranks."""

import dataclasses
from pathlib import Path

import msgspec
import torch

from protocol.errors import SettingsError
from trainer.backends.base import FrozenModel, Replicas
from trainer.execution.commands import (
    ExitCommand,
    FinishSaveCommand,
    RestoreCommand,
    SaveCommand,
    StepCommand,
    decode_command,
)
from trainer.execution.state_writer import CHECKPOINT, StateWriter
from trainer.ranks.wire import BetweenModels, receive_bytes, receive_part, send_bytes
from trainer.roles.critic import Critic
from trainer.roles.models import CRITIC, critic_directory
from trainer.step.train_command import UpdateSchedule
from trainer.step.update import batches_of
from trainer.storage.host_state import HostState


class FollowerLink:
    """The model's end of a `RoleLink`, on one of its ranks."""

    def __init__(self, wire: BetweenModels, rank: int, replicas: Replicas) -> None:
        """Wrap a connection.

        Args:
            wire: connection to rank 0 of the policy.
            rank: this process's rank in the model.
            replicas: ranks of each replica of the model.
        """
        self.wire, self._rank, self._replicas = wire, rank, replicas

    def announce_ready(self) -> None:
        """Report from rank 0 that the model is loaded."""
        self.send_message(msgspec.msgpack.encode([list(ranks) for ranks in self._replicas]))

    def send_rows(self, values: torch.Tensor) -> None:
        """Send a value of each token of this replica's part, float32 [t], from the replica's first rank."""
        if any(ranks[0] == self._rank for ranks in self._replicas):
            self.wire.send(values, 0)

    def receive_rows(self, entries: int) -> torch.Tensor:
        """Wait for a value of each token of this replica's part: float32 [entries]."""
        return self.wire.receive(entries, torch.float32)

    def send_message(self, data: bytes) -> None:
        """Send a non-empty message from the model's rank 0."""
        if self._rank == 0:
            send_bytes(self.wire, data, 0)


class FrozenFollower:
    """Rank of a frozen model, which computes its numbers for the tokens of each step."""

    def __init__(self, role: str, model: FrozenModel, link: FollowerLink) -> None:
        """Take ownership of a loaded model, and notify rank 0.

        Args:
            role: section of the model's settings.
        """
        self._role, self._model, self._link = role, model, link
        link.announce_ready()

    def follow(self) -> None:
        """Compute the numbers of each step, until `ExitCommand`; other commands are ignored."""
        while not isinstance(command := decode_command(receive_bytes(self._link.wire)), ExitCommand):
            if isinstance(command, StepCommand):
                self._step(command)

    def _step(self, command: StepCommand) -> None:
        part = receive_part(self._link.wire)
        if self._role != "reference" or command.schedule.reference_logprobs:
            self._link.send_rows(self._model.evaluate(part))


class CriticFollower:
    """Rank of a critic, which computes values, trains on returns, and saves and restores its state."""

    def __init__(self, critic: Critic, link: FollowerLink) -> None:
        """Take ownership of a loaded critic, and notify rank 0."""
        self._critic, self._link = critic, link
        self._writer = StateWriter()
        link.announce_ready()

    def follow(self) -> None:
        """Execute the commands that affect the critic, until `ExitCommand`.

        Raises:
            SettingsError: a checkpoint cannot be restored; rank 0 has received the reason.
        """
        while not isinstance(command := decode_command(receive_bytes(self._link.wire)), ExitCommand):
            match command:
                case StepCommand():
                    self._step(command.schedule)
                case SaveCommand():
                    own = HostState({}, parts={CRITIC: self._critic.copy_state()})
                    self._writer.begin(own, Path(command.directory))
                case FinishSaveCommand():
                    self._send_reason(self._writer.finish().get(CHECKPOINT, ""))
                case RestoreCommand():
                    self._restore(Path(command.directory))
                case _:
                    pass  # affects only the policy
        self._writer.close()
        self._critic.close()

    def _step(self, schedule: UpdateSchedule) -> None:
        part = receive_part(self._link.wire)
        if torch.cuda.is_initialized():  # the critic reports the peak of its step
            torch.cuda.reset_peak_memory_stats()
        values = self._critic.values(part)
        self._link.send_rows(values)
        returns = self._link.receive_rows(len(values))
        part = dataclasses.replace(part, values=values, returns=returns)
        for batch in batches_of(part, schedule):
            stats = self._critic.train_step(batch)
            self._link.send_message(msgspec.msgpack.encode(stats))

    def _restore(self, directory: Path) -> None:
        own = critic_directory(directory)  # if missing, the policy's ranks raise the same error
        try:
            self._critic.restore(own)
        except SettingsError as error:
            self._send_reason(str(error))
            raise
        self._send_reason("")

    def _send_reason(self, reason: str) -> None:
        self._link.send_message(msgspec.msgpack.encode(reason))

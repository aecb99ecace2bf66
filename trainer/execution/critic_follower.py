"""Carries out the commands of rank 0 on a rank of a critic that is apart from the policy."""

import dataclasses
from pathlib import Path

import msgspec
import torch

from protocol.errors import SettingsError
from trainer.execution.commands import (
    ExitCommand,
    FinishSaveCommand,
    RestoreCommand,
    SaveCommand,
    StepCommand,
    decode_command,
)
from trainer.execution.role_follower import RoleSeat
from trainer.execution.state_writer import StateWriter
from trainer.ranks.scatter_batch import receive_part
from trainer.ranks.wire import receive_bytes
from trainer.roles.critic import Critic
from trainer.roles.models import CRITIC, critic_directory
from trainer.step.train_command import UpdateSchedule
from trainer.step.update import batches_of
from trainer.storage.host_state import HostState


class CriticFollower:
    """A rank of a critic: it values each step, is trained on its returns, and is saved and restored."""

    def __init__(self, critic: Critic, seat: RoleSeat) -> None:
        """Take over a loaded critic, and tell rank 0.

        Args:
            critic: this rank's part.
            seat: the way to rank 0 and back.
        """
        self._critic, self._seat = critic, seat
        self._writer = StateWriter()
        seat.say_ready()

    def follow(self) -> None:
        """Carry out what concerns the critic, until rank 0 says exit.

        Raises:
            SettingsError: a checkpoint cannot be restored; rank 0 knows why.
        """
        while not isinstance(command := decode_command(receive_bytes(self._seat.wire)), ExitCommand):
            match command:
                case StepCommand():
                    self._step(command.schedule)
                case SaveCommand():
                    own = HostState({}, parts={CRITIC: self._critic.copy_state()})
                    self._writer.begin(own, Path(command.directory))
                case FinishSaveCommand():
                    self._say(self._writer.finish())
                case RestoreCommand():
                    self._restore(Path(command.directory))
                case _:
                    pass  # it concerns the policy alone
        self._writer.close()
        self._critic.close()

    def _step(self, schedule: UpdateSchedule) -> None:
        part = receive_part(self._seat.wire)
        if torch.cuda.is_initialized():  # the critic reports the peak of its step
            torch.cuda.reset_peak_memory_stats()
        values = self._critic.values(part)
        self._seat.send_rows(values)
        returns = self._seat.receive_rows(len(values))
        part = dataclasses.replace(part, values=values, returns=returns)
        for batch in batches_of(part, schedule):
            stats = self._critic.train_step(batch)
            self._seat.send_message(msgspec.msgpack.encode(stats))

    def _restore(self, directory: Path) -> None:
        own = critic_directory(directory)  # where it is missing, the policy's ranks see that, too
        try:
            self._critic.restore(own)
        except SettingsError as error:
            self._say(str(error))
            raise
        self._say("")

    def _say(self, reason: str) -> None:
        self._seat.send_message(msgspec.msgpack.encode(reason))

"""Carries out the commands of rank 0 on the other ranks."""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from protocol.errors import TetherError
from trainer.backends.rank_commands import (
    DraftCommand,
    ExitCommand,
    ExportCommand,
    ExportModelCommand,
    FinishSaveCommand,
    IdleCommand,
    KeepReferenceCommand,
    OffloadCommand,
    OnloadCommand,
    PublishCommand,
    RestoreCommand,
    SaveCommand,
    StepCommand,
    is_distributed,
    next_command,
)
from trainer.backends.scatter_batch import receive_part
from trainer.backends.state_writer import StateWriter
from trainer.roles.models import RankModels
from trainer.roles.step import run_step
from trainer.weights.base import WeightSender
from trainer.weights.publish import publish


def offload_and_wait(models: RankModels) -> None:
    """Move what this rank has on its device to the host, and wait until every rank has.

    The ranks share one lock of the device, so rank 0 may release it only then.
    """
    models.offload()
    if is_distributed():
        dist.barrier()


def follow_commands(models: RankModels, sender: WeightSender | None = None) -> None:
    """Carry out what rank 0 commands, on a rank other than 0, until it says exit.

    Args:
        models: this rank's parts of the models.
        sender: that of this rank; None where rank 0 publishes all.
    """
    writer, policy = StateWriter(), models.policy
    publishing: dict[type, Callable[..., object]] = {PublishCommand: lambda c: _exhaust(policy.export())}
    if sender is not None:
        publishing = {
            DraftCommand: lambda c: sender.provisional(c.epoch, c.version),
            PublishCommand: lambda c: publish(policy, sender, c.epoch, c.version, c.dtype),
        }
    actions: dict[type, Callable[..., object]] = {
        StepCommand: lambda c: run_step(models, receive_part(), c),
        ExportCommand: lambda c: _exhaust(policy.export()),
        ExportModelCommand: lambda c: _exhaust(policy.export_model()),
        SaveCommand: lambda c: writer.begin(models.copy_state(), Path(c.directory)),
        FinishSaveCommand: lambda c: _finish(writer),
        RestoreCommand: lambda c: models.restore(Path(c.directory)),
        KeepReferenceCommand: lambda c: models.keep_reference(),
        OffloadCommand: lambda c: offload_and_wait(models),
        OnloadCommand: lambda c: models.onload(),
        IdleCommand: lambda c: None,
        **publishing,
    }
    while not isinstance(command := next_command(), ExitCommand):
        actions[type(command)](command)
    writer.close()


def _exhaust(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Take part in an export, which yields nothing on this rank."""
    for _ in tensors:
        raise RuntimeError("only rank 0 gets tensors from an export")


def _finish(writer: StateWriter) -> None:
    """Take part in finishing a checkpoint; rank 0 reports that it failed."""
    with contextlib.suppress(TetherError):
        writer.finish()

"""Executes the commands of rank 0 on every rank."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

from protocol.codec import decode_payload
from protocol.errors import ProtocolError
from protocol.messages import ScoredRollout
from trainer.algorithms.base import Algorithm
from trainer.backends.base import Backend, StepStats
from trainer.backends.hf_export import save_hf
from trainer.backends.rank_commands import (
    ExitCommand,
    ExportCommand,
    ExportHfCommand,
    IdleCommand,
    KeepReferenceCommand,
    OffloadCommand,
    OnloadCommand,
    RestoreCommand,
    SaveCommand,
    TrainCommand,
    broadcast_command,
    is_distributed,
    next_command,
)
from trainer.batch import Batch
from trainer.data.batch_builder import BuiltBatch, build_batch


def run_step_on_all_ranks(
    backend: Backend, algorithm: Algorithm, command: TrainCommand
) -> tuple[BuiltBatch, StepStats]:
    """Make a step from rank 0: build the batch, have the other ranks do so, then step on all of them.

    Raises:
        ProtocolError, BoundViolation: as `decode_batch`; no rank has done anything then.
    """
    built = decode_batch(command, algorithm)
    broadcast_command(command)
    return built, run_step(backend, built.batch, command)


def decode_batch(command: TrainCommand, algorithm: Algorithm) -> BuiltBatch:
    """Build the batch of a command, the same on every rank.

    Raises:
        ProtocolError: a record is not a scored rollout.
        BoundViolation: a token over the bound would carry gradient.
    """
    groups = []
    for record, bound in zip(command.records, command.bounds, strict=True):
        message = decode_payload(record)
        if not isinstance(message, ScoredRollout):
            raise ProtocolError(f"spool record is a {type(message).__name__}, not a ScoredRollout")
        groups.append((message, bound))
    built = build_batch(
        groups,
        step=command.step,
        algorithm=algorithm,
        temperature=command.temperature,
        mask_late=command.mask_late,
    )
    chosen = torch.tensor([is_measured(group, command.mismatch_share) for group in built.trained_counts])
    batch = dataclasses.replace(built.batch, measured=chosen[built.batch.group_index])
    return built._replace(batch=batch)


def is_measured(group: int, share: float) -> bool:
    """Return whether the mismatch of a group is measured: always the same groups, about a `share` of them."""
    return xxhash.xxh3_64_intdigest(b"%d" % group) < share * 2**64


def run_step(backend: Backend, batch: Batch, command: TrainCommand) -> StepStats:
    """Compute the log-probabilities that the command asks for, then step. Called on every rank."""
    if command.recompute_logprobs:
        batch = dataclasses.replace(batch, proximal_logprobs=backend.logprobs(batch))
    if command.reference_logprobs:
        batch = dataclasses.replace(batch, reference_logprobs=backend.reference_logprobs(batch))
    return backend.train_step(batch)


def save_and_wait(backend: Backend, directory: Path) -> None:
    """Write this rank's part of a checkpoint, and wait until every rank has."""
    backend.save(directory)
    if is_distributed():
        dist.barrier()


def offload_and_wait(backend: Backend) -> None:
    """Move what this rank has on its device to the host, and wait until every rank has.

    The ranks share one lock of the device, so rank 0 may release it only then.
    """
    backend.offload()
    if is_distributed():
        dist.barrier()


def follow_commands(backend: Backend, algorithm: Algorithm) -> None:
    """Carry out what rank 0 commands, on a rank other than 0, until it says exit."""
    actions: dict[type, Callable[..., object]] = {
        TrainCommand: lambda c: run_step(backend, decode_batch(c, algorithm).batch, c),
        ExportCommand: lambda c: _exhaust(backend),
        ExportHfCommand: lambda c: save_hf(backend, Path(c.directory), source=Path(c.source)),
        SaveCommand: lambda c: save_and_wait(backend, Path(c.directory)),
        RestoreCommand: lambda c: backend.restore(Path(c.directory)),
        KeepReferenceCommand: lambda c: backend.keep_reference(),
        OffloadCommand: lambda c: offload_and_wait(backend),
        OnloadCommand: lambda c: backend.onload(),
        IdleCommand: lambda c: None,
    }
    while not isinstance(command := next_command(), ExitCommand):
        actions[type(command)](command)


def _exhaust(backend: Backend) -> None:
    """Take part in an export, which yields nothing on this rank."""
    for _ in backend.export():
        pass

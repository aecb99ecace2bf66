"""Executes the commands of rank 0 on every rank."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from protocol.codec import decode_payload
from protocol.errors import ProtocolError, TetherError
from protocol.messages import ScoredRollout
from trainer.algorithms.base import Algorithm
from trainer.backends.base import Backend, StepStats
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
    TrainCommand,
    broadcast_command,
    is_distributed,
    next_command,
)
from trainer.backends.scatter_batch import receive_part, send_part
from trainer.backends.state_writer import StateWriter
from trainer.batch import Batch
from trainer.data.packing import balance
from trainer.data.step_plan import StepPlan, plan_step
from trainer.weights.parts.publish import draft_parts, publish_parts
from trainer.weights.parts.sender import PartSender


def run_step_on_all_ranks(
    backend: Backend, algorithm: Algorithm, command: TrainCommand
) -> tuple[StepPlan, StepStats]:
    """Make a step from rank 0: plan it, send every replica its part, then step on all ranks.

    Raises:
        ProtocolError, BoundViolation: as `plan_command`; no rank has done anything then.
    """
    plan = plan_command(command, algorithm)
    costs = backend.costs(plan.lengths)
    pieces = balance(costs.tolist(), len(backend.replicas))
    broadcast_command(StepCommand(command.reference_logprobs))
    for ranks, piece in zip(backend.replicas[1:], pieces[1:], strict=True):
        send_part(plan.part(piece), ranks)
    own = plan.part(pieces[0])
    send_part(own, [rank for rank in backend.replicas[0] if rank != 0])
    stats = run_step(backend, own, reference_logprobs=command.reference_logprobs)
    imbalance = _imbalance([float(costs[piece].sum()) for piece in pieces])
    return plan, dataclasses.replace(stats, imbalance=imbalance)


def plan_command(command: TrainCommand, algorithm: Algorithm) -> StepPlan:
    """Plan the step of a command.

    Raises:
        ProtocolError: a record is not a scored rollout, or `plan_step` refuses it.
        BoundViolation: a token over the bound would carry gradient.
    """
    return plan_step(
        ((_scored(record), bound) for record, bound in zip(command.records, command.bounds, strict=True)),
        step=command.step,
        algorithm=algorithm,
        temperature=command.temperature,
        mask_late=command.mask_late,
        decoupled=command.recompute_logprobs,
        mismatch_share=command.mismatch_share,
    )


def _scored(record: bytes) -> ScoredRollout:
    message = decode_payload(record)
    if not isinstance(message, ScoredRollout):
        raise ProtocolError(f"spool record is a {type(message).__name__}, not a ScoredRollout")
    return message


def _imbalance(costs: Sequence[float]) -> float:
    """Return by which share the dearest replica is over the mean."""
    return max(costs) * len(costs) / sum(costs) - 1


def run_step(backend: Backend, part: Batch, *, reference_logprobs: bool) -> StepStats:
    """Make the step with the part of this rank's replica. Called on every rank."""
    if reference_logprobs:
        part = dataclasses.replace(part, reference_logprobs=backend.reference_logprobs(part))
    return backend.train_step(part)


def offload_and_wait(backend: Backend) -> None:
    """Move what this rank has on its device to the host, and wait until every rank has.

    The ranks share one lock of the device, so rank 0 may release it only then.
    """
    backend.offload()
    if is_distributed():
        dist.barrier()


def follow_commands(backend: Backend, sender: PartSender | None = None) -> None:
    """Carry out what rank 0 commands, on a rank other than 0, until it says exit.

    Args:
        backend: this rank's part of the model.
        sender: publishes it, where versions stay on the ranks.
    """
    writer = StateWriter()
    publishing: dict[type, Callable[..., object]] = {}
    if sender is not None:
        publishing = {
            DraftCommand: lambda c: draft_parts(sender, c.epoch, c.version),
            PublishCommand: lambda c: publish_parts(backend, sender, c.epoch, c.version),
        }
    actions: dict[type, Callable[..., object]] = {
        StepCommand: lambda c: run_step(backend, receive_part(), reference_logprobs=c.reference_logprobs),
        ExportCommand: lambda c: _exhaust(backend.export()),
        ExportModelCommand: lambda c: _exhaust(backend.export_model()),
        SaveCommand: lambda c: writer.begin(backend.copy_state(), Path(c.directory)),
        FinishSaveCommand: lambda c: _finish(writer),
        RestoreCommand: lambda c: backend.restore(Path(c.directory)),
        KeepReferenceCommand: lambda c: backend.keep_reference(),
        OffloadCommand: lambda c: offload_and_wait(backend),
        OnloadCommand: lambda c: backend.onload(),
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

"""How trainer rank 0 tells the other ranks what to do next: one small command, broadcast as bytes; no pickles
between ranks either.

Rank 0 decides, every rank calls the same `Backend` method in the same order. The followers' loop is
`follow_commands`.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from protocol.codec import decode_payload
from protocol.errors import ProtocolError
from protocol.messages import ScoredRollout
from trainer.algorithms.base import Algorithm
from trainer.backends.base import Backend, StepStats
from trainer.backends.hf_export import save_hf
from trainer.batch import Batch
from trainer.data.batch_builder import BuiltBatch, build_batch


class TrainCommand(msgspec.Struct, frozen=True, tag="train"):
    """One optimizer step on these groups."""

    step: int
    records: list[bytes]
    """Encoded `ScoredRollout`s, as the spool holds them."""
    bounds: list[int]
    """max_staleness of each group's lease."""
    mask_late: bool
    temperature: float
    recompute_logprobs: bool
    reference_logprobs: bool


class ExportCommand(msgspec.Struct, frozen=True, tag="export"):
    """Take part in an export."""


class SaveCommand(msgspec.Struct, frozen=True, tag="save"):
    """Write this rank's part of a checkpoint."""

    directory: str


class RestoreCommand(msgspec.Struct, frozen=True, tag="restore"):
    """Read this rank's part of a checkpoint."""

    directory: str


class ExportHfCommand(msgspec.Struct, frozen=True, tag="export_hf"):
    """Take part in writing a Hugging Face directory."""

    directory: str
    source: str
    """Model directory that config and tokenizer are copied from."""


class KeepReferenceCommand(msgspec.Struct, frozen=True, tag="keep_reference"):
    """Keep the current weights as the reference model."""


class OffloadCommand(msgspec.Struct, frozen=True, tag="offload"):
    """Move everything on the device to the host."""


class OnloadCommand(msgspec.Struct, frozen=True, tag="onload"):
    """Take it back."""


class IdleCommand(msgspec.Struct, frozen=True, tag="idle"):
    """Nothing to do yet; keeps the followers' wait bounded."""


class ExitCommand(msgspec.Struct, frozen=True, tag="exit"):
    """The run is over."""


Command = (
    TrainCommand
    | ExportCommand
    | ExportHfCommand
    | SaveCommand
    | RestoreCommand
    | KeepReferenceCommand
    | OffloadCommand
    | OnloadCommand
    | IdleCommand
    | ExitCommand
)
_decoder = msgspec.msgpack.Decoder(Command)


def is_distributed() -> bool:
    """Whether there is more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def broadcast_command(command: Command) -> None:
    """Rank 0: send a command to every other rank. Without other ranks this does nothing."""
    if is_distributed():
        data = torch.frombuffer(bytearray(msgspec.msgpack.encode(command)), dtype=torch.uint8)
        device = _control_device()
        dist.broadcast(torch.tensor([data.numel()], dtype=torch.int64, device=device), src=0)
        dist.broadcast(data.to(device), src=0)


def next_command() -> Command:
    """Other ranks: wait for the next command, at most as long as the process group's timeout."""
    device = _control_device()
    size = torch.empty(1, dtype=torch.int64, device=device)
    dist.broadcast(size, src=0)
    data = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    dist.broadcast(data, src=0)
    return _decoder.decode(data.cpu().numpy().tobytes())


def _control_device() -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )


def decode_batch(command: TrainCommand, algorithm: Algorithm) -> BuiltBatch:
    """The batch of a command, the same on every rank.

    Raises:
        ProtocolError: if a record is not a scored rollout.
        BoundViolation: if a token over the bound would carry gradient.
    """
    groups = []
    for record, bound in zip(command.records, command.bounds, strict=True):
        message = decode_payload(record)
        if not isinstance(message, ScoredRollout):
            raise ProtocolError(f"spool record is a {type(message).__name__}, not a ScoredRollout")
        groups.append((message, bound))
    return build_batch(
        groups,
        step=command.step,
        algorithm=algorithm,
        temperature=command.temperature,
        mask_late=command.mask_late,
    )


def run_step(backend: Backend, batch: Batch, command: TrainCommand) -> StepStats:
    """What every rank does for one step: recompute what the algorithm asks for, then step."""
    if command.recompute_logprobs:
        batch = dataclasses.replace(batch, proximal_logprobs=backend.logprobs(batch))
    if command.reference_logprobs:
        batch = dataclasses.replace(batch, reference_logprobs=backend.reference_logprobs(batch))
    return backend.train_step(batch)


def run_step_on_all_ranks(
    backend: Backend, algorithm: Algorithm, command: TrainCommand
) -> tuple[BuiltBatch, StepStats]:
    """Rank 0's side of a step: build the batch (nothing has happened yet if that raises), have the other
    ranks join in, and step."""
    built = decode_batch(command, algorithm)
    broadcast_command(command)
    return built, run_step(backend, built.batch, command)


def save_part(backend: Backend, directory: Path) -> None:
    """Write this rank's part of a checkpoint, and wait until every rank has."""
    backend.save(directory)
    if is_distributed():
        dist.barrier()


def leave_device(backend: Backend) -> None:
    """Move what this rank holds on the device to the host, and wait until every rank has: the lock of the
    device is theirs together."""
    backend.offload()
    if is_distributed():
        dist.barrier()


def _exhaust(backend: Backend) -> None:
    for _ in backend.export():
        pass


def follow_commands(backend: Backend, algorithm: Algorithm) -> None:
    """Ranks other than 0: do what rank 0 announces until it says exit."""
    actions: dict[type, Callable[..., object]] = {
        TrainCommand: lambda c: run_step(backend, decode_batch(c, algorithm).batch, c),
        ExportCommand: lambda c: _exhaust(backend),
        ExportHfCommand: lambda c: save_hf(backend, Path(c.directory), source=Path(c.source)),
        SaveCommand: lambda c: save_part(backend, Path(c.directory)),
        RestoreCommand: lambda c: backend.restore(Path(c.directory)),
        KeepReferenceCommand: lambda c: backend.keep_reference(),
        OffloadCommand: lambda c: leave_device(backend),
        OnloadCommand: lambda c: backend.onload(),
        IdleCommand: lambda c: None,
    }
    while not isinstance(command := next_command(), ExitCommand):
        actions[type(command)](command)

"""Defines the commands of trainer rank 0 to the other ranks, and sends them.

A command is one small message, sent as bytes: no pickle between ranks either. Rank 0 decides, every rank
calls the same `Backend` method in the same order.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from trainer.batch import StepTotals


class TrainCommand(msgspec.Struct, frozen=True):
    """Make a step on these groups. Rank 0 alone reads it; the others get a `StepCommand`."""

    step: int
    """Version that the step starts from."""
    records: list[bytes]
    """Encoded `ScoredRollout` of each group, as the spool holds it."""
    bounds: list[int]
    """max_staleness of each group's lease, versions."""
    mask_late: bool
    """Whether tokens over the bound are masked; else one is an error."""
    temperature: float
    """At which the tokens were sampled."""
    recompute_logprobs: bool
    """Whether the trainer's own log-probabilities at the start of the step are the proximal ones."""
    reference_logprobs: bool
    """Whether to compute log-probabilities under the reference model before the step."""
    mismatch_share: float = 1.0
    """Share of the groups whose mismatch of trainer and engine is measured, 0 to 1."""
    epochs: int = 1
    """Times that each sample is trained."""
    mini_batches: int = 1
    """Parts that the batch is divided into, each of which is an update."""
    seed: int = 0
    """Decides the division, with the number of the step."""
    max_tokens: int = 0
    """Limit of one generation, tokens."""


class StepCommand(msgspec.Struct, frozen=True, tag="step"):
    """Receive the part of a step that this rank's replica works on, and make the step."""

    reference_logprobs: bool
    """Whether to compute log-probabilities under the reference model before it."""
    updates: tuple[int, ...] = (0,)
    """The mini-batch of each update, in order."""
    mini_batches: tuple[StepTotals, ...] = ()
    """Totals of each mini-batch; empty: the step is one update on all of its batch."""
    start_logprobs: bool = False
    """Whether updates need the log-probabilities under the policy at the start of the step from a pass."""
    second_moment_threshold: float = 0.0
    """As the setting of that name; 0: off. Each update then begins with a pass."""


class ExportCommand(msgspec.Struct, frozen=True, tag="export"):
    """Take part in an export."""


class DraftCommand(msgspec.Struct, frozen=True, tag="draft"):
    """Accept requests for this rank's part of a version that the next `PublishCommand` will make."""

    epoch: str
    version: int


class PublishCommand(msgspec.Struct, frozen=True, tag="publish"):
    """Publish this rank's part of a version, or take part in the export of what rank 0 publishes."""

    epoch: str
    version: int
    dtype: str
    """In which it is published."""


class SaveCommand(msgspec.Struct, frozen=True, tag="save"):
    """Copy this rank's part of a checkpoint to the host, and begin to write it."""

    directory: str


class FinishSaveCommand(msgspec.Struct, frozen=True, tag="finish_save"):
    """Wait until every rank has written its part of the checkpoint that was begun last."""


class RestoreCommand(msgspec.Struct, frozen=True, tag="restore"):
    """Read this rank's part of a checkpoint."""

    directory: str


class ExportModelCommand(msgspec.Struct, frozen=True, tag="export_model"):
    """Take part in an export of the whole model."""


class KeepReferenceCommand(msgspec.Struct, frozen=True, tag="keep_reference"):
    """Keep the current weights as the reference model."""


class OffloadCommand(msgspec.Struct, frozen=True, tag="offload"):
    """Move everything on the device to the host."""


class OnloadCommand(msgspec.Struct, frozen=True, tag="onload"):
    """Move what was on the device back to it."""


class IdleCommand(msgspec.Struct, frozen=True, tag="idle"):
    """Do nothing: keeps the other ranks' wait bounded."""


class ExitCommand(msgspec.Struct, frozen=True, tag="exit"):
    """End: the run is over."""


Command = (
    StepCommand
    | ExportCommand
    | ExportModelCommand
    | DraftCommand
    | PublishCommand
    | SaveCommand
    | FinishSaveCommand
    | RestoreCommand
    | KeepReferenceCommand
    | OffloadCommand
    | OnloadCommand
    | IdleCommand
    | ExitCommand
)
_decoder = msgspec.msgpack.Decoder(Command)
QUEUE = "tether/commands/"
"""Key of a rank's queue in the store, before its number."""


def is_distributed() -> bool:
    """Return whether there is more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def broadcast_command(command: Command) -> None:
    """Send a command from rank 0 to every other rank. Without other ranks this does nothing."""
    if not is_distributed():
        return
    data = msgspec.msgpack.encode(command)
    if control_device().type == "cuda":
        queue_for_others(data)
        return
    message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(torch.tensor([message.numel()], dtype=torch.int64), src=0)
    dist.broadcast(message, src=0)


def next_command() -> Command:
    """Wait for the next command, on a rank other than 0; at most the process group's timeout.

    The rank waits on the host: a broadcast over NCCL would be a kernel that runs until the command comes, on
    a GPU that engines may share.
    """
    if control_device().type == "cuda":
        return _decoder.decode(next_queued())
    size = torch.empty(1, dtype=torch.int64)
    dist.broadcast(size, src=0)
    data = torch.empty(int(size.item()), dtype=torch.uint8)
    dist.broadcast(data, src=0)
    return _decoder.decode(data.numpy().tobytes())


def queue_for_others(data: bytes) -> None:
    """Queue a message of rank 0 for each other rank, in the store where the ranks have met."""
    store = _store()
    for rank in range(1, dist.get_world_size()):
        store.queue_push(f"{QUEUE}{rank}", data)


def next_queued() -> bytes:
    """Wait for the next message of `queue_for_others`, in order, on a rank other than 0.

    Raises:
        RuntimeError: none comes within the process group's timeout, or the store's host has ended.
    """
    # by a connection of its own: meanwhile NCCL's threads use the process's
    data: bytes = _store().clone().queue_pop(f"{QUEUE}{dist.get_rank()}")
    return data


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def gather_bytes(data: bytes) -> list[bytes]:
    """Return what every rank gave, by rank, on rank 0; an empty list on the others. A collective."""
    device = control_device()
    if dist.get_rank() != 0:
        dist.send(torch.tensor([len(data)], device=device), 0)
        if data:
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), 0)
        return []
    found = [data]
    for rank in range(1, dist.get_world_size()):
        size = torch.empty(1, dtype=torch.int64, device=device)
        dist.recv(size, rank)
        part = torch.empty(int(size), dtype=torch.uint8, device=device)
        if len(part):
            dist.recv(part, rank)
        found.append(part.cpu().numpy().tobytes())
    return found


def of_all_replicas(values: torch.Tensor, replicas: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the values of all replicas, one after the other, on every rank. A collective.

    Args:
        values: float32 [k] on the CPU, alike on all ranks of a replica; k differs between replicas.
        replicas: ranks of each replica.
    """
    if not is_distributed():
        return values
    own = next(number for number, ranks in enumerate(replicas) if dist.get_rank() in ranks)
    speaks = dist.get_rank() == replicas[own][0]
    counts = torch.zeros(len(replicas), dtype=torch.int64, device=control_device())
    counts[own] = len(values) if speaks else 0
    dist.all_reduce(counts)
    ends = counts.cumsum(0).tolist()
    whole = torch.zeros(ends[-1], dtype=torch.float32, device=control_device())
    if speaks:
        whole[ends[own] - len(values) : ends[own]] = values.to(whole.device)
    dist.all_reduce(whole)
    return whole.cpu()


def agreed(value: bool) -> bool:
    """Return what rank 0 decided, on every rank. A collective."""
    decision = torch.tensor([int(value)], device=control_device())
    dist.broadcast(decision, src=0)
    return bool(decision.item())


def control_device() -> torch.device:
    """Return where tensors lie that ranks send to each other."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )

"""Sends the parts of a step from rank 0 to the ranks of each replica: arrays as bytes, no pickle.

A part is a header, which names its arrays, and then one message for each array. Every wait is bounded by the
process group's timeout.
"""

from collections.abc import Callable, Iterable

import msgspec
import torch
import torch.distributed as dist

from trainer.backends.rank_commands import control_device
from trainer.batch import SAMPLE_FIELDS, TOKEN_FIELDS, Batch, StepTotals

ARRAYS = ("offsets", *TOKEN_FIELDS, *SAMPLE_FIELDS)
DTYPES = {str(dtype): dtype for dtype in (torch.bool, torch.int32, torch.int64, torch.float32)}


class PartHeader(msgspec.Struct, frozen=True):
    """What a part is, but for the values of its arrays."""

    step: int
    totals: StepTotals
    temperature: float
    decoupled: bool
    arrays: dict[str, tuple[str, int]]
    """Name -> dtype and number of entries, in the order in which they are sent."""


_decoder = msgspec.msgpack.Decoder(PartHeader)


def send_part(part: Batch, ranks: Iterable[int]) -> None:
    """Send a part to other ranks, one after the other; returns when all have it."""
    arrays = {name: values for name in ARRAYS if (values := getattr(part, name)) is not None}
    header = PartHeader(
        step=part.step,
        totals=part.totals,
        temperature=part.temperature,
        decoupled=part.decoupled,
        arrays={name: (str(values.dtype), len(values)) for name, values in arrays.items()},
    )
    data = torch.frombuffer(bytearray(msgspec.msgpack.encode(header)), dtype=torch.uint8)
    for rank in ranks:
        _exchange(dist.isend, torch.tensor([len(data)]), rank)
        _exchange(dist.isend, data, rank)
        for values in arrays.values():
            _exchange(dist.isend, values, rank)


def receive_part() -> Batch:
    """Wait for the part that rank 0 sends to this rank."""
    size = _exchange(dist.irecv, torch.empty(1, dtype=torch.int64))
    data = _exchange(dist.irecv, torch.empty(int(size), dtype=torch.uint8))
    header = _decoder.decode(data.numpy().tobytes())
    arrays = {
        name: _exchange(dist.irecv, torch.empty(entries, dtype=DTYPES[dtype]))
        for name, (dtype, entries) in header.arrays.items()
    }
    fields = {name: getattr(header, name) for name in ("step", "totals", "temperature", "decoupled")}
    return Batch(**fields, **arrays)


def _exchange(operation: Callable[..., object], values: torch.Tensor, rank: int = 0) -> torch.Tensor:
    """Send an array to a rank, or receive it from one; an empty one is not sent. Returns it on the CPU.

    As a batch of one operation, which NCCL runs in the communicator of all ranks: it would make and keep one
    for each pair of ranks otherwise.
    """
    if values.numel():
        moved = values.to(control_device())
        for work in dist.batch_isend_irecv([dist.P2POp(operation, moved.view(torch.uint8), rank)]):
            work.wait()
        return moved.cpu()
    return values

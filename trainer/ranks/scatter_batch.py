"""Sends the parts of a step from rank 0 to the ranks of each replica: arrays as bytes, no pickle.

A part is a header, which names its arrays, and then one message for each array. Every wait is bounded by the
process group's timeout.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from trainer.batch import SAMPLE_FIELDS, TOKEN_FIELDS, Batch, StepTotals
from trainer.ranks.collectives import control_device

ARRAYS = ("offsets", *TOKEN_FIELDS, *SAMPLE_FIELDS)
DTYPES = {str(dtype): dtype for dtype in (torch.bool, torch.int16, torch.int32, torch.int64, torch.float32)}


class PartHeader(msgspec.Struct, frozen=True):
    """What a part is, but for the values of its arrays."""

    step: int
    totals: StepTotals
    temperature: float
    decoupled: bool
    arrays: dict[str, tuple[str, tuple[int, ...]]]
    """Name -> dtype and shape, in the order in which they are sent."""


_decoder = msgspec.msgpack.Decoder(PartHeader)


def send_part(part: Batch, ranks: Iterable[int]) -> None:
    """Send a part to other ranks, one after the other; returns when all have it."""
    arrays = {name: values for name in ARRAYS if (values := getattr(part, name)) is not None}
    header = PartHeader(
        step=part.step,
        totals=part.totals,
        temperature=part.temperature,
        decoupled=part.decoupled,
        arrays={name: (str(values.dtype), tuple(values.shape)) for name, values in arrays.items()},
    )
    data = torch.frombuffer(bytearray(msgspec.msgpack.encode(header)), dtype=torch.uint8)
    for rank in ranks:
        for values in (torch.tensor([len(data)]), data, *arrays.values()):
            _exchange(dist.isend, values.to(control_device()), rank)


def receive_part() -> Batch:
    """Wait for the part that rank 0 sends to this rank."""
    data = _receive(int(_receive(1, torch.int64)), torch.uint8)
    header = _decoder.decode(data.numpy().tobytes())
    arrays: dict[str, Any] = {
        name: _receive(math.prod(shape), DTYPES[dtype]).view(shape)
        for name, (dtype, shape) in header.arrays.items()
    }
    return Batch(
        step=header.step,
        totals=header.totals,
        temperature=header.temperature,
        decoupled=header.decoupled,
        **arrays,
    )


def _receive(entries: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.empty(entries, dtype=dtype, device=control_device())
    _exchange(dist.irecv, values, 0)
    return values.cpu()


def _exchange(operation: Callable[..., object], values: torch.Tensor, rank: int) -> None:
    """Send an array to a rank, or receive it from one; an empty one is not sent.

    As a batch of one operation, which NCCL runs in the communicator of all ranks: it would make and keep one
    for each pair of ranks otherwise.
    """
    if len(values):
        for work in dist.batch_isend_irecv([dist.P2POp(operation, values.flatten().view(torch.uint8), rank)]):
            work.wait()

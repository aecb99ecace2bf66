"""Sends arrays, messages and the parts of a step between two ranks, of the same model or of two models.

Every wait is bounded by the process group's timeout.

A part is a header, which names its arrays, and then one message for each array: no pickle.
"""

import math
from collections.abc import Iterable
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from trainer.batch import SAMPLE_FIELDS, TOKEN_FIELDS, Batch, StepTotals
from trainer.ranks.collectives import batched_p2p, control_device


class OwnRanks:
    """Connection between the ranks of one model, which share the default process group.

    Arrays arrive in the order in which they were sent.
    """

    def send(self, values: torch.Tensor, rank: int) -> None:
        """Send an array, on the CPU, to a rank; returns when it has it. An empty one is not sent."""
        if len(values):
            batched_p2p(dist.isend, _bytes(values.to(control_device())), rank)

    def receive(self, entries: int, dtype: torch.dtype, rank: int = 0) -> torch.Tensor:
        """Wait for an array of a rank, [entries], on the CPU. An empty one was not sent."""
        values = torch.empty(entries, dtype=dtype, device=control_device())
        if entries:
            batched_p2p(dist.irecv, _bytes(values), rank)
        return values.cpu()


class BetweenModels:
    """Connection of rank 0 of the policy, which is rank 0 here, and the ranks of another model, on gloo."""

    def __init__(self, group: Any) -> None:
        """Take over a connected `ProcessGroupGloo`."""
        self._group = group

    @property
    def others(self) -> range:
        """Ranks of the other model."""
        return range(1, self._group.size())

    def send(self, values: torch.Tensor, rank: int) -> None:
        """Send an array, on the CPU, as `OwnRanks.send` does."""
        if len(values):
            self._group.send([_bytes(values)], rank, 0).wait()

    def receive(self, entries: int, dtype: torch.dtype, rank: int = 0) -> torch.Tensor:
        """Receive an array as `OwnRanks.receive` does."""
        values = torch.empty(entries, dtype=dtype)
        if entries:
            self._group.recv([_bytes(values)], rank, 0).wait()
        return values


Wire = OwnRanks | BetweenModels


def send_bytes(wire: Wire, data: bytes, rank: int) -> None:
    """Send a message, which is not empty."""
    wire.send(torch.tensor([len(data)]), rank)
    wire.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank)


def receive_bytes(wire: Wire, rank: int = 0) -> bytes:
    """Wait for a message of a rank."""
    data = wire.receive(int(wire.receive(1, torch.int64, rank)), torch.uint8, rank)
    return data.numpy().tobytes()


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().flatten().view(torch.uint8)


ARRAYS = ("offsets", *TOKEN_FIELDS, *SAMPLE_FIELDS)
DTYPES = {str(dtype): dtype for dtype in (torch.bool, torch.int16, torch.int32, torch.int64, torch.float32)}


class PartHeader(msgspec.Struct, frozen=True):
    """Description of a part, without its arrays' values."""

    step: int
    totals: StepTotals
    temperature: float
    decoupled: bool
    arrays: dict[str, tuple[str, tuple[int, ...]]]
    """Name -> dtype and shape, in the order in which they are sent."""


_decoder = msgspec.msgpack.Decoder(PartHeader)
OWN_RANKS = OwnRanks()


def send_part(part: Batch, ranks: Iterable[int], wire: Wire = OWN_RANKS) -> None:
    """Send a part to other ranks, one after the other; returns when all have it."""
    arrays = {name: values for name in ARRAYS if (values := getattr(part, name)) is not None}
    header = PartHeader(
        step=part.step,
        totals=part.totals,
        temperature=part.temperature,
        decoupled=part.decoupled,
        arrays={name: (str(values.dtype), tuple(values.shape)) for name, values in arrays.items()},
    )
    data = msgspec.msgpack.encode(header)
    for rank in ranks:
        send_bytes(wire, data, rank)
        for values in arrays.values():
            wire.send(values, rank)


def receive_part(wire: Wire = OWN_RANKS) -> Batch:
    """Wait for the part that rank 0 sends to this rank."""
    header = _decoder.decode(receive_bytes(wire))
    arrays: dict[str, Any] = {
        name: wire.receive(math.prod(shape), DTYPES[dtype]).view(shape)
        for name, (dtype, shape) in header.arrays.items()
    }
    return Batch(
        step=header.step,
        totals=header.totals,
        temperature=header.temperature,
        decoupled=header.decoupled,
        **arrays,
    )

"""Sends arrays, messages and the parts of a step between two ranks, of the same model or of two models.

Every wait is bounded by the process group's timeout.

A part is sent as a header, which describes the arrays, and one message per array, without pickle.
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

    Arrays arrive in sending order.
    """

    def send(self, values: torch.Tensor, rank: int) -> None:
        """Send a CPU array to a rank; block until it arrives. An empty array is not sent."""
        if len(values):
            batched_p2p(dist.isend, _bytes(values.to(control_device())), rank)

    def receive(self, entries: int, dtype: torch.dtype, rank: int = 0) -> torch.Tensor:
        """Wait for an array of a rank, [entries], on the CPU. An empty array is not received."""
        values = torch.empty(entries, dtype=dtype, device=control_device())
        if entries:
            batched_p2p(dist.irecv, _bytes(values), rank)
        return values.cpu()


class BetweenModels:
    """Gloo connection between rank 0 of the policy (rank 0 here) and the ranks of another model."""

    def __init__(self, group: Any) -> None:
        """Wrap a connected `ProcessGroupGloo`."""
        self._group = group

    @property
    def others(self) -> range:
        """Ranks of the other model."""
        return range(1, self._group.size())

    def send(self, values: torch.Tensor, rank: int) -> None:
        """Send a CPU array, as `OwnRanks.send`."""
        if len(values):
            self._group.send([_bytes(values)], rank, 0).wait()

    def receive(self, entries: int, dtype: torch.dtype, rank: int = 0) -> torch.Tensor:
        """Receive an array, as `OwnRanks.receive`."""
        values = torch.empty(entries, dtype=dtype)
        if entries:
            self._group.recv([_bytes(values)], rank, 0).wait()
        return values


Wire = OwnRanks | BetweenModels


def send_bytes(wire: Wire, data: bytes, rank: int) -> None:
    """Send a non-empty message."""
    wire.send(torch.tensor([len(data)]), rank)
    wire.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank)


def receive_bytes(wire: Wire, rank: int = 0) -> bytes:
    """Wait for a message from a rank."""
    data = wire.receive(int(wire.receive(1, torch.int64, rank)), torch.uint8, rank)
    return data.numpy().tobytes()


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().flatten().view(torch.uint8)


ARRAYS = ("offsets", *TOKEN_FIELDS, *SAMPLE_FIELDS)
DTYPES = {str(dtype): dtype for dtype in (torch.bool, torch.int16, torch.int32, torch.int64, torch.float32)}


class PartHeader(msgspec.Struct, frozen=True):
    """Description of a part, without the contents of its arrays."""

    step: int
    totals: StepTotals
    temperature: float
    decoupled: bool
    arrays: dict[str, tuple[str, tuple[int, ...]]]
    """Name -> dtype and shape, in sending order."""


_decoder = msgspec.msgpack.Decoder(PartHeader)
OWN_RANKS = OwnRanks()


def send_part(part: Batch, ranks: Iterable[int], wire: Wire = OWN_RANKS) -> None:
    """Send a part to other ranks, one after the other; block until all ranks have it."""
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
    """Wait for this rank's part from rank 0."""
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

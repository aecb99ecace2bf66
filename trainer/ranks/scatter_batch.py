"""Sends the parts of a step from rank 0 to the ranks of each replica: arrays as bytes, no pickle.

A part is a header, which names its arrays, and then one message for each array.
"""

import math
from collections.abc import Iterable
from typing import Any

import msgspec
import torch

from trainer.batch import SAMPLE_FIELDS, TOKEN_FIELDS, Batch, StepTotals
from trainer.ranks.wire import OwnRanks, Wire, receive_bytes, send_bytes

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

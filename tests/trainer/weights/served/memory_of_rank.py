"""Memory of a rank that publishes: `python -m tests.trainer.weights.served.memory_of_rank MIB RANKS`.

It is the last rank. It prints its report in hex, and then by how many MiB its memory grew at most while it
copied and digested its part; at the next line on standard input the same for what came after.
"""

import json
import sys
from pathlib import Path

import msgspec
import torch

from protocol.weights.boxes import shape_of
from tests.trainer.weights.served.trainer_ranks import TrainerRanks, halves

TENSORS = 8
BUCKET_MIB = 1


def made_of(mib: int, ranks: int) -> TrainerRanks:
    """A model of so many MiB, half of its tensors split by rows and half by columns."""
    side = 1024
    shape = (mib * (1 << 20) // 4 // TENSORS // side, side)
    shapes = {f"t{i}": shape for i in range(TENSORS)}
    return TrainerRanks(
        {name: list(enumerate(halves(shape, i % 2, ranks))) for i, name in enumerate(shapes)}, shapes, ranks
    )


def status_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


class Peak:
    """By how much the resident memory grows at most."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._start = status_mib("VmRSS:")

    def mib(self) -> float:
        return status_mib("VmHWM:") - self._start


def main(mib: int, ranks: int) -> None:
    made = made_of(mib, ranks)
    rank = ranks - 1
    sender = made.senders[rank]
    held = [
        (made.publication.names[piece.tensor], torch.full(shape_of(piece.box), float(i)))
        for i, piece in enumerate(made.publication.parts[rank])
    ]
    sender.fill("e1", 0, held)  # imports and first uses of libraries
    sender.serve_or_discard(False)
    peak = Peak()
    report = sender.fill("e1", 1, held)
    sender.serve_or_discard(True)
    print(msgspec.msgpack.encode(report).hex(), flush=True)
    print(json.dumps(peak.mib()), flush=True)
    peak = Peak()
    sys.stdin.readline()
    print(json.dumps(peak.mib()), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

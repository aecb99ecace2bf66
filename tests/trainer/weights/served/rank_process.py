"""A trainer's rank as a process: `python -m tests.trainer.weights.served.rank_process TRANSPORT RANK RANKS`.

It publishes two versions of the tensors of `tests/trainer/weights/receiver.py`, rows of each, prints a report
in hex for each, and stays until it is killed.
"""

import sys

import msgspec
import torch

from tests.trainer.weights.receiver import COUNT, SIZE
from tests.trainer.weights.served.trainer_ranks import TrainerRanks, halves

SHAPES = {f"t{i}": (SIZE,) for i in range(COUNT)}


def made_of(transport: str, ranks: int) -> TrainerRanks:
    boxes = {name: list(enumerate(halves((SIZE,), 0, ranks))) for name in SHAPES}
    return TrainerRanks(boxes, SHAPES, ranks, transport)


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Other numbers in each tensor of each version."""
    return {f"t{i}": torch.full((SIZE,), float(100 * version + i)) for i in range(COUNT)}


def main(transport: str, rank: int, ranks: int) -> None:
    made = made_of(transport, ranks)
    for version in (1, 2):
        report = made.senders[rank].fill("e1", version, made.pieces(rank, tensors(version)))
        made.senders[rank].serve_or_discard(True)
        print(msgspec.msgpack.encode(report).hex(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

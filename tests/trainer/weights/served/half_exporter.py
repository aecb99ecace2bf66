"""A trainer as a process that never completes version 2; run as a module.

It publishes version 1 with `weights.delta`, prints the manifest in hex, exports half of version 2 as an
announced version, and stays until it is killed.
"""

import sys
from collections.abc import Iterator

import msgspec
import torch

from protocol.weights.boxes import whole
from tests.trainer.weights.served.trainer_ranks import TrainerRanks

SHAPES = {f"t{i}": (600, 400) for i in range(16)}
HALF = tuple(SHAPES)[: len(SHAPES) // 2]


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Versions that differ in some elements of each tensor."""
    found = {name: torch.full(shape, float(i)) for i, (name, shape) in enumerate(SHAPES.items())}
    for tensor in found.values():
        tensor.view(-1)[::99] += version
    return found


def trainer() -> TrainerRanks:
    boxes = {name: [(0, whole(shape))] for name, shape in SHAPES.items()}
    return TrainerRanks(boxes, SHAPES, 1, delta=True)


def half() -> Iterator[tuple[str, torch.Tensor]]:
    for name in HALF:
        yield name, tensors(2)[name]
    sys.stdin.read()


def main() -> None:
    made = trainer()
    print(msgspec.msgpack.encode(made.publish("e1", 1, tensors(1))).hex(), flush=True)
    made.draft("e1", 2)
    made.senders[0].fill("e1", 2, half())


if __name__ == "__main__":
    main()

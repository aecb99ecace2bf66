"""Ranks of a trainer that write versions to files together; run by `launch`, with a directory.

Each has rows or columns of tensors. With "delta" every third version is an anchor; with "apart" no file is
written by two ranks, and rank 0 has a path of its own to the directory, as on another host. One version
cannot be exported by a rank, and two cannot be made by rank 0. Engines that are current, late or new read
them on rank 0.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from protocol.errors import WeightError
from protocol.messages import WeightManifest, WeightPart, WeightPiece
from protocol.weights.boxes import Box, whole
from protocol.weights.deltas import INDEX, changes_name
from rollout.staging.staging import Staging, digest_of, whole_source
from tests.trainer.weights.senders import layout_of
from tests.trainer.weights.served.trainer_ranks import halves, index
from trainer.config import WeightConfig
from trainer.weights.base import WeightSender
from trainer.weights.files import disk_sender
from trainer.weights.version_writer import PartFollower

SHAPES = {"rows": (60, 41), "columns": (31, 60), "norm": (41,), "scale": (), "none": (0, 3)}
DTYPE = torch.bfloat16
LEAVES_OUT, IS_A_FILE, NOT_BEGUN = 4, 7, 10
FAILING = {
    LEAVES_OUT: "version 4: rank 1: the export has",
    IS_A_FILE: "Not a directory",
    NOT_BEGUN: "File exists",
}
"""Version -> why it cannot be published; the next one is an anchor if the ranks had begun to write."""


def tensors(version: int) -> dict[str, torch.Tensor]:
    """Versions that differ in some elements of each tensor from the one before."""
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=generator).to(DTYPE) for name, shape in SHAPES.items()}
    for number in range(version):
        for name in ("rows", "columns"):
            found[name].view(-1)[number::37] += 1
    return found


def boxes(rank: int, ranks: int) -> Iterator[tuple[int, Box]]:
    yield 0, halves(SHAPES["rows"], 0, ranks)[rank]
    yield 1, halves(SHAPES["columns"], 1, ranks)[rank]
    for number, name in enumerate(("norm", "scale", "none"), 2):
        if rank == number % ranks:
            yield number, whole(SHAPES[name])


def blank(config: WeightConfig, ranks: int) -> WeightManifest:
    parts = [WeightPart("", tuple(WeightPiece(*one) for one in boxes(rank, ranks))) for rank in range(ranks)]
    return replace(layout_of(tensors(0).items(), config), parts=tuple(parts))


def pieces(version: int, rank: int, ranks: int) -> list[tuple[str, torch.Tensor]]:
    made, names = tensors(version), list(SHAPES)
    return [(names[number], made[names[number]][index(box)]) for number, box in boxes(rank, ranks)]


class Engine:
    """A staging copy."""

    def __init__(self) -> None:
        self.copy = {name: torch.zeros(shape, dtype=DTYPE) for name, shape in SHAPES.items()}
        self.staging = Staging({name: whole_source(tensor) for name, tensor in self.copy.items()})

    def serve(self, manifest: WeightManifest, version: int) -> int:
        """Stage a version; return the bytes that were read for it."""
        self.staging.fetch(manifest, 30)
        assert digest_of(self.copy) == manifest.digest == digest_of(tensors(version))
        return int(self.staging._receiver._receiver._image.read)  # type: ignore[union-attr]


def publish(sender: WeightSender, version: int, rank: int, ranks: int) -> WeightManifest | None:
    """Publish a version; None if rank 0 has to refuse it, or on another rank."""
    given = pieces(version, rank, ranks)
    error = FAILING.get(version)
    if rank:
        sender.publish("e1", version, given[1:] if version == LEAVES_OUT and rank == 1 else given)
        return None
    if error is None:
        return sender.publish("e1", version, given)
    with pytest.raises(WeightError, match=error):
        sender.publish("e1", version, given)
    return None


def main(directory: Path, *, apart: bool, delta: bool) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.chdir(directory.parent if rank == 0 else "/")
    path = Path("/proc/self/cwd", directory.name) if apart and rank == 0 else directory
    config = WeightConfig(transport="disk", directory=str(path), keep=9, delta=delta, anchor_every=3)
    layout = blank(config, ranks)
    sender: WeightSender = PartFollower(config, directory, rank, layout)
    if rank == 0:
        sender = disk_sender(config, directory, layout, per_rank_files=apart)
    assert sender.in_parts
    whole_bytes = sum(entry.nbytes for entry in layout.tensors)
    current, late, chains = Engine(), Engine(), []
    for version in range(12):
        name = f"v{version:08d}-e1"
        if version in (IS_A_FILE, NOT_BEGUN) and rank == 0:
            (directory / (name if version == IS_A_FILE else f"{name}.tmp")).touch()
        manifest = publish(sender, version, rank, ranks)
        if manifest is None:
            continue
        chains.append(len(manifest.chain))
        read = current.serve(manifest, version)
        assert read == manifest.chain[-1].nbytes
        if version % 4 == 1:
            late.serve(manifest, version)
        Engine().serve(manifest, version)
        is_anchor = len(manifest.chain) == 1
        assert read >= whole_bytes if is_anchor else 0 < read < whole_bytes / 8
        names = sorted(path.name for path in Path(manifest.location).iterdir())
        own = [INDEX, *map(changes_name, range(ranks)), "manifest.json"]
        assert names == (own if apart or not is_anchor else ["bucket_00000.bin", "manifest.json"])
    if rank == 0:
        assert chains == ([1, 2, 3, 1, 1, 2, 1, 2, 3] if delta else [1] * 9), chains
    with closing(sender):
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), apart="apart" in sys.argv, delta="delta" in sys.argv)

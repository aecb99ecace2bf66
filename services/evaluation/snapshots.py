"""Finds the snapshots that the trainer has written, and chooses the one to score next."""

import contextlib
import shutil
from collections.abc import Collection, Sequence
from operator import attrgetter
from pathlib import Path

from protocol.messages import WeightManifest
from services.run_record.evaluations import LEFT_OUT, SNAPSHOTS
from trainer.weights.version_directories import read_manifests

Key = tuple[int, str, str]
"""Version, digest and set: the unit that is scored once."""


def read_snapshots(run_dir: Path) -> list[WeightManifest]:
    """Return the manifests of the snapshots that are there, by version, the newer epoch last."""
    return sorted(read_manifests(run_dir / SNAPSHOTS), key=attrgetter("version"))


def remove_snapshot(manifest: WeightManifest) -> None:
    """Remove a snapshot, also one that the trainer is removing."""
    shutil.rmtree(manifest.location, ignore_errors=True)


def mark_left_out(manifest: WeightManifest) -> None:
    """Tell the end of the run that this snapshot will not be scored."""
    with contextlib.suppress(OSError):  # being removed
        (Path(manifest.location) / LEFT_OUT).touch()


def forget_left_out(run_dir: Path) -> None:
    """Take back every `mark_left_out`: all snapshots that are there are tried again."""
    for path in (run_dir / SNAPSHOTS).glob(f"v*/{LEFT_OUT}"):
        path.unlink(missing_ok=True)


def keys_of(manifest: WeightManifest, sets: Collection[str]) -> list[Key]:
    """Return the keys of a version."""
    return [(manifest.version, f"{manifest.digest:016x}", name) for name in sets]


def is_scored(manifest: WeightManifest, scored: Collection[Key], sets: Collection[str]) -> bool:
    """Return whether a version was scored on every set."""
    return all(key in scored for key in keys_of(manifest, sets))


def next_snapshot(
    snapshots: Sequence[WeightManifest], scored: Collection[Key], sets: Collection[str]
) -> WeightManifest | None:
    """Return the snapshot to score next: one begun before, then version 0, then the newest; or None.

    Args:
        snapshots: existing snapshots, by version.
        scored: keys with a line in eval.jsonl.
        sets: names of the held-out sets.
    """
    left = [snapshot for snapshot in snapshots if not is_scored(snapshot, scored, sets)]
    begun = [s for s in left if any(key in scored for key in keys_of(s, sets))]
    first = [s for s in left if s.version == 0]
    return next(iter([*begun, *first, *left[-1:]]), None)

"""Finds damaged files in a run directory, for `tether verify --files`.

Every byte of the files in `CHECKS` is read. A file that the run removes during the check is skipped.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import SpoolError
from services.ledger.event_log.hash_chain import damaged_lines, head_path
from services.settings.resume import EARLIER
from trainer.storage.archive import Archive
from trainer.storage.checkpoints import MANIFEST
from trainer.storage.checksums import FILE, damaged_document, damaged_files, listed_files
from trainer.storage.spool import Spool, is_initialized_spool
from trainer.storage.write_ahead_log import damage_in_log

Damage = Iterator[tuple[Path, str]]
"""Pairs of a damaged file's path and a description of the damage."""


@dataclass(frozen=True, slots=True)
class CheckedFiles:
    """Result of checking the files of a run directory. Paths are relative to the directory."""

    checked: int
    """Number of files that were read."""
    checked_bytes: int
    damaged: list[str]
    """A sentence per damage; begins with the file's path."""
    not_covered: list[str]
    """Files without a checksum, and directories that contain only such files."""


def check_files(run_dir: Path) -> CheckedFiles:
    """Read all files of a run that have checksums, and compare the checksums."""
    checked: set[Path] = set()
    damaged: list[str] = []
    for pattern, check, read_with in CHECKS:
        for path in sorted(run_dir.glob(pattern)):
            if path.is_symlink() or path.suffix == ".tmp":
                continue
            found = [f"{file.relative_to(run_dir)}: {problem}" for file, problem in check(path)]
            damaged += found if path.exists() else []
            checked |= {path, *read_with(path)}
    sizes = dict(_sizes(checked))
    return CheckedFiles(
        checked=len(sizes),
        checked_bytes=sum(sizes.values()),
        damaged=damaged,
        not_covered=_summed_up(run_dir, set(_files(run_dir)) - sizes.keys(), sizes.keys()),
    )


def _sizes(paths: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    for path in paths:
        with suppress(OSError):
            if path.is_file():
                yield path, path.stat().st_size


def _files(directory: Path) -> Iterator[Path]:
    """Yield all files below a directory. `Path.rglob` would raise if a folder is removed meanwhile."""
    for folder, _, names in os.walk(directory):
        paths = (Path(folder, name) for name in names)
        yield from (path for path in paths if path.is_file() and not path.is_symlink())


def _missing_log(head: Path) -> Damage:
    if not head.with_suffix(".jsonl").is_file():
        yield head.with_suffix(".jsonl"), f"is missing, and {head.name} is there"


def _steps(path: Path) -> Damage:
    """Yield the damage of metrics.jsonl. Its newest lines are not synced; the ledger has their reports."""
    return damaged_lines(path, "; the next start of the run writes again what a loss of power cut")


def _archived_step(path: Path) -> Damage:
    step = path.stem.removeprefix("step_")
    try:
        Archive(path.parent).read(int(step))
    except (SpoolError, ValueError) as error:
        yield path, str(error)


def _spool(path: Path) -> Damage:
    log = path.with_name(f"{path.name}-wal")
    try:
        # before SQLite opens and truncates the log; twice, because a run may be writing to it
        if (problem := damage_in_log(log)) is not None and problem == damage_in_log(log):
            yield log, problem
        elif is_initialized_spool(path):
            with closing(Spool(path, read_only=True)) as spool:
                for item in spool.damaged():
                    yield path, f"{item.what} is not what was written"
    except (SpoolError, OSError) as error:
        yield path, str(error)


def _model(directory: Path) -> Damage:
    return damaged_files(directory / FILE)


def _listed_model_files(directory: Path) -> set[Path]:
    return {directory / FILE, *_listed(directory / FILE)}


def _listed(path: Path) -> set[Path]:
    return {path.parent / part.name for part in listed_files(path)}


def _head(path: Path) -> set[Path]:
    return {head_path(path)}


def _spool_companions(path: Path) -> set[Path]:
    return {path.with_name(f"{path.name}{suffix}") for suffix in ("-wal", "-shm")}


def _no_companions(_: Path) -> set[Path]:
    return set()


CHECKS: tuple[tuple[str, Callable[[Path], Damage], Callable[[Path], set[Path]]], ...] = (
    ("audit.jsonl", damaged_lines, _head),
    ("metrics.jsonl", _steps, _head),
    ("eval.jsonl", damaged_lines, _head),
    ("*.head", _missing_log, _no_companions),
    ("settings.json", damaged_document, _no_companions),
    (EARLIER, damaged_document, _no_companions),
    ("hub.json", damaged_document, _no_companions),
    ("frozen_models.json", damaged_document, _no_companions),
    ("exports/best.json", damaged_document, _no_companions),
    ("exports/*/", _model, _listed_model_files),
    (f"checkpoints/step_*/{MANIFEST}", damaged_files, _listed),
    ("archive/step_*.msgpack", _archived_step, _no_companions),
    ("spool.sqlite", _spool, _spool_companions),
)
"""Pattern of paths, function that yields the damage of a path, function that returns files read with it."""


def _summed_up(run_dir: Path, unchecked: Set[Path], checked: Set[Path]) -> list[str]:
    """Return names of files; a directory without checked files replaces all files in it."""
    kept = {parent for path in checked for parent in path.parents} | {run_dir}
    names = set()
    for path in unchecked:
        folders = [folder for folder in path.parents if folder not in kept and folder.is_relative_to(run_dir)]
        names.add(f"{folders[-1].relative_to(run_dir)}/" if folders else str(path.relative_to(run_dir)))
    return sorted(names)

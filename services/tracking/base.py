"""Defines the protocol of a tracking library; `tests/contracts/tracker_suite.py` is the contract."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class TrackedPoint(NamedTuple):
    """Numbers in one line of metrics.jsonl or eval.jsonl."""

    ordinal: int
    """Number of the point in the run's history, from 0; increases also when steps are repeated."""
    version: int
    """Number of committed steps, the x axis."""
    time: float
    """Unix seconds."""
    numbers: Mapping[str, float]
    """Name such as train/reward_mean or eval/SET/greedy -> finite number."""
    samples: Sequence[Sequence[Any]] = ()
    """Rows of `sample_table.COLUMNS`, for libraries with tables; others ignore them."""


@dataclass(frozen=True, slots=True)
class TrackerOptions:
    """Arguments for opening a tracker."""

    project: str
    name: str
    tags: tuple[str, ...]
    settings: Mapping[str, Any]
    """Settings of the run by dotted name: strings, numbers, booleans."""
    directory: Path
    """Output directory of this library; it exists."""
    offline: bool = False
    run_id: str = ""
    """`Tracker.run_id` when the run was last opened; empty for a new run."""
    next_version: int | None = None
    """Lowest version that may follow the sent points; None for a new run."""


class LineReader(Protocol):
    """Reader that converts lines of the run's files to items of a library."""

    files: tuple[str, ...]
    """Names of files in the run directory."""

    def items(self, file: str, data: bytes, ordinal: int) -> list[Any]:
        """Return the items in a line of a file; `ordinal` is the number of the first item."""

    def version_of(self, item: Any) -> int | None:
        """Return the version of a step's item; None for other items."""

    def finish(self) -> None:
        """Stop waiting for other files, because the run is over."""


class Tracker(Protocol):
    """A run in a tracking library. Methods block; after any exception the tracker is opened again."""

    run_id: str
    """Id of the run in the library, with which it can be continued."""
    url: str
    """Location of the run for users: a URL, a directory or a command."""

    def log(self, points: Sequence[Any]) -> None:
        """Add items of the kind's `LineReader` in order: spans or points.

        A point with an earlier version means that the version was repeated; it replaces all later points.
        """

    def close(self) -> None:
        """Send the remaining points and close the run, which can be opened again."""

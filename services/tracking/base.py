"""Defines the protocol of a tracking library; `tests/contracts/tracker_suite.py` is the contract."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class TrackedPoint(NamedTuple):
    """The numbers of one line of metrics.jsonl or eval.jsonl."""

    ordinal: int
    """Number of the point in the run's history, from 0: it rises also where steps are made again."""
    version: int
    """The x axis: committed steps."""
    time: float
    """Unix seconds."""
    numbers: Mapping[str, float]
    """Name such as train/reward_mean or eval/SET/greedy -> finite number."""
    samples: Sequence[Sequence[Any]] = ()
    """Rows of `sample_table.COLUMNS`, for libraries that show tables; others leave them out."""


@dataclass(frozen=True, slots=True)
class TrackerOptions:
    """Arguments for opening a tracker."""

    project: str
    name: str
    tags: tuple[str, ...]
    settings: Mapping[str, Any]
    """Settings of the run by dotted name: strings, numbers, booleans."""
    directory: Path
    """Where a library may write; it exists and belongs to this kind alone."""
    offline: bool = False
    run_id: str = ""
    """What `Tracker.run_id` was when the run was opened before; empty for a new one."""
    next_version: int | None = None
    """Lowest version that may still come after the points that were sent; None for a new run."""


class LineReader(Protocol):
    """Reader of a library's items in the run's files."""

    files: tuple[str, ...]
    """Names in the run directory."""

    def items(self, file: str, data: bytes, ordinal: int) -> list[Any]:
        """Return the items of a line of a file; `ordinal` is the number of the first one."""

    def version_of(self, item: Any) -> int | None:
        """Return the version of an item that is a step's; None of any other."""

    def finish(self) -> None:
        """Wait for no other file from here on: the run is over."""


class Tracker(Protocol):
    """One run in a tracking library. Methods block; any exception means that the tracker is opened again."""

    run_id: str
    """Names the run in the library, so that it can be continued."""
    url: str
    """Where a person finds it: a URL, a folder or a command."""

    def log(self, points: Sequence[Any]) -> None:
        """Add items of the kind's `LineReader` in order: spans, or else points.

        The version of a point that came before was made again and replaces what came after it.
        """

    def close(self) -> None:
        """Send the remaining points and close the run; it can be opened again."""

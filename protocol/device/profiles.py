"""Traces of torch.profiler: of a block, or of steps that are counted one by one; each rank writes its own.

A trace is FILE.rank_00000.json.gz, which opens in ui.perfetto.dev. It is written aside and renamed.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from protocol.host.atomic_file import written_aside

log = logging.getLogger("tether.profiles")


@contextmanager
def profiled(file: str, rank: int) -> Iterator[None]:
    """Profile a block, and write this rank's trace; without a file there is no profile.

    Args:
        file: path without the ending, which names rank and format.
        rank: this process's.

    Raises:
        OSError: it cannot be written.
    """
    if not file:
        yield
        return
    with _new_profile() as result:
        yield
    _write(result, file, rank)


class StepProfile:
    """Profile of the next steps of a loop; all methods are called by the thread that makes the steps."""

    def __init__(self) -> None:
        """Make no profile."""
        self._profile: profile | None = None
        self._file, self._rank, self._left = "", 0, 0

    def begin_or_end(self, file: str, rank: int, steps: int) -> None:
        """Write the profile that is on, if one is, and watch the next `steps` steps, if they are not 0.

        Args:
            file: as in `profiled`.
            rank: as in `profiled`.
            steps: most steps that are watched.

        Raises:
            OSError: the profile that was on cannot be written; it is over nevertheless, and none begins.
        """
        self.end()
        if not steps:
            return
        self._file, self._rank, self._left = file, rank, steps
        self._profile = _new_profile()
        self._profile.start()

    def step_begins(self) -> None:
        """Count a step; the one after the last that is watched ends the profile, as `step_ended` does."""
        if self._left:
            self._left -= 1
        else:
            self._end_logged()

    def step_ended(self) -> None:
        """Count a step; the last one that is watched ends the profile.

        A trace that cannot be written is logged, and no reason to end the loop.
        """
        self._left -= 1
        if self._left <= 0:
            self._end_logged()

    def _end_logged(self) -> None:
        try:
            self.end()
        except OSError as error:
            log.error("profile.not_written file=%s error=%r", self._file, error)

    def end(self) -> None:
        """Write the profile that is on, if one is.

        Raises:
            OSError: it cannot be written; it is over nevertheless.
        """
        result, self._profile = self._profile, None
        if result is not None:
            result.stop()
            _write(result, self._file, self._rank)


def _new_profile() -> profile:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities)


def _write(result: profile, file: str, rank: int) -> None:
    path = Path(f"{file}.rank_{rank:05d}.json.gz")
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path, aside=path.with_name(f"aside.{path.name}")) as aside:
        result.export_chrome_trace(str(aside))

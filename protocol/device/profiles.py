"""Traces a block, or a number of steps, with torch.profiler; each rank writes its own trace.

A trace is FILE.rank_00000.json.gz, which opens in ui.perfetto.dev. It is written to a temporary file and
renamed.
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
    """Profile a block and write this rank's trace; an empty `file` disables the profile.

    Args:
        file: path without the suffix, which contains rank and format.

    Raises:
        OSError: the trace cannot be written.
    """
    if not file:
        yield
        return
    with _new_profile() as result:
        yield
    _write(result, file, rank)


class StepProfile:
    """Profile of the next steps of a loop; only the thread that runs the steps calls the methods."""

    def __init__(self) -> None:
        """Create the object without a profile."""
        self._profile: profile | None = None
        self._file, self._rank, self._left = "", 0, 0

    def begin_or_end(self, file: str, rank: int, steps: int) -> None:
        """Write the running profile, if any, and profile the next `steps` steps unless `steps` is 0.

        Args:
            file, rank: as in `profiled`.
            steps: maximum number of steps to profile.

        Raises:
            OSError: the running profile cannot be written; it ends nevertheless, and no new profile begins.
        """
        self.end()
        if not steps:
            return
        self._file, self._rank, self._left = file, rank, steps
        self._profile = _new_profile()
        self._profile.start()

    def step_begins(self) -> None:
        """Count a step; the first step after the last profiled one ends the profile, as in `step_ended`."""
        if self._left:
            self._left -= 1
        else:
            self._end_logged()

    def step_ended(self) -> None:
        """Count a step; the last profiled step ends the profile.

        A failure to write the trace is logged and does not end the loop.
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
        """Write the running profile, if any.

        Raises:
            OSError: the trace cannot be written; the profile ends nevertheless.
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

"""Follows the files of a run and sends their new points to one tracking library.

The files are the queue. A slow, unreachable or broken library only falls behind, memory holds one chunk of a
file at a time, and no point is lost or sent twice, except for points that a kill interrupts.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from services.run_record.lines import LineFollower
from services.settings.load import public_settings
from services.settings.sections import Settings
from services.settings.tracking import SPANS, TABLES
from services.tracking.base import LineReader, Tracker, TrackerOptions
from services.tracking.points import PointReader, flat_settings
from services.tracking.registry import open_tracker
from services.tracking.spans import SpanReader
from services.tracking.state import FOLDER, read_state, write_state

log = logging.getLogger("tether.tracking")

CHUNK_BYTES = 1 << 18
"""Maximum number of bytes of a file per chunk."""
RETRY_S = (5.0, 300.0)
"""Seconds before a failed library is retried: first and longest delay."""
MAX_PROBLEM = 300
"""Maximum number of characters of a library's error that are shown."""


class TrackedRun:
    """A run in one library. Methods block with the library, and never raise its errors."""

    def __init__(
        self,
        kind: str,
        settings: Settings,
        open_library: Callable[[str, TrackerOptions], Tracker] = open_tracker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the arguments; resume from the state on disk."""
        self.kind = kind
        self._settings = settings
        self._open_library = open_library
        self._clock = clock
        self._tracker: Tracker | None = None
        self._delay_s, self._retry_at = RETRY_S[0], float("-inf")
        self.state = read_state(settings.run_dir, kind)
        self._reader: LineReader
        self._followers = self._follow()

    def advance(self) -> bool:
        """Send the next chunk of each file; return whether more can be sent at once."""
        if self._clock() < self._retry_at:
            return False
        try:
            more = any([self._send_piece(name) for name in self._followers])
        except (Exception, SystemExit) as error:
            self._fail(error)
            return False
        return more

    def finish(self) -> None:
        """Send the remaining points, with one more attempt after a failure, and close the library."""
        self._reader.finish()
        self._retry_at = float("-inf")
        while self.advance():
            pass
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            try:
                tracker.close()
            except (Exception, SystemExit) as error:
                self._fail(error)

    def _send_piece(self, name: str) -> bool:
        lines, more = self._followers[name].read()
        points: list[Any] = []
        for line in lines:
            points += self._reader.items(name, line.data, self.state.sent + len(points))
        if points:
            self._log(points)
        if self._followers[name].offset != self.state.offsets.get(name, 0):
            self._save(
                offsets={**self.state.offsets, name: self._followers[name].offset},
                sent=self.state.sent + len(points),
                problem="",
            )
        return more

    def _log(self, points: list[Any]) -> None:
        if self._tracker is None:
            self._tracker = self._open_library(self.kind, self._options())
            self._save(run_id=self._tracker.run_id, url=self._tracker.url)
            log.info(
                "tracking.open kind=%s run=%s url=%s", self.kind, self._tracker.run_id, self._tracker.url
            )
        self._tracker.log(points)
        self._delay_s = RETRY_S[0]
        version = self._reader.version_of(points[-1])
        if version is not None:
            self.state = msgspec.structs.replace(self.state, version=version)

    def _options(self) -> TrackerOptions:
        config, run_dir = self._settings.tracking, self._settings.run_dir
        directory = run_dir / FOLDER / self.kind
        directory.mkdir(parents=True, exist_ok=True)
        return TrackerOptions(
            project=config.project,
            name=config.name or self._settings.run.name,
            tags=config.tags,
            settings=flat_settings(public_settings(run_dir)),
            directory=directory,
            offline=config.offline,
            run_id=self.state.run_id,
            next_version=self.state.version + 1 if self.state.run_id else None,
        )

    def _save(self, **changes: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)
        write_state(self._settings.run_dir, self.kind, self.state)

    def _fail(self, error: BaseException) -> None:
        """Record an error; later retry from the stored offsets."""
        text = f"{type(error).__name__}: {error}".strip().replace("\n", " ")[:MAX_PROBLEM]
        log.warning("tracking.failed kind=%s retry_s=%.0f error=%s", self.kind, self._delay_s, text)
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            with contextlib.suppress(Exception, SystemExit):
                tracker.close()
        self._followers = self._follow()
        self._retry_at = self._clock() + self._delay_s
        self._delay_s = min(2 * self._delay_s, RETRY_S[1])
        with contextlib.suppress(OSError):
            self._save(problem=text)

    def _follow(self) -> dict[str, LineFollower]:
        """Follow the reader's files from the stored offsets."""
        offsets, run_dir = self.state.offsets, self._settings.run_dir
        every = self._settings.tracking.samples_every if self.kind in TABLES else 0
        is_spans = self.kind == SPANS
        self._reader = SpanReader(run_dir, offsets) if is_spans else PointReader(run_dir, every)
        return {
            name: LineFollower(run_dir / name, chunk_bytes=CHUNK_BYTES, offset=offsets.get(name, 0))
            for name in self._reader.files
        }

"""Shows the progress of `tether up` as a live view if the output is a terminal."""

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from protocol.errors import TetherError
from services.launcher.live_view import RunView, render_view
from services.ledger.interface import Ledger
from services.observability.best_effort_stream import BestEffortStream
from services.observability.printable import printable
from services.observability.service_rows import (
    MISSING,
    STARTS,
    ServiceRow,
    Supervised,
    scaled_to_zero,
    service_rows,
)
from services.observability.status import collect_status
from services.run_record.progress import Progress, expected_processes
from services.run_record.steps import RATE_STEPS

REDRAW_S = 0.25
ASK_S = 1.0
"""Seconds between two queries to the ledger."""


def open_progress(run: str, run_dir: Path, steps: int, out: TextIO | None = None) -> Progress:
    """Return a live view of the progress on a terminal, else one that prints plain lines.

    The run continues if the stream fails.
    """
    out = cast(TextIO, BestEffortStream(out or sys.stdout))
    if is_interactive(out, os.environ):
        return LiveProgress(run, run_dir, steps, out)
    return Progress(run_dir, steps, out)


def is_interactive(out: TextIO, environ: Mapping[str, str]) -> bool:
    """Return whether a stream is a redrawable terminal and the user has not disabled the live view."""
    return out.isatty() and not environ.get("NO_COLOR") and environ.get("TERM", "dumb") not in ("dumb", "")


class LiveProgress(Progress):
    """Redraws a `RunView` at the bottom of a terminal; other lines are printed above it."""

    def __init__(self, run: str, run_dir: Path, steps: int, out: TextIO) -> None:
        """Start without a view; `note` prints lines at once."""
        super().__init__(run_dir, steps, out)
        self._run = run
        self._console = Console(file=out, highlight=False)
        self._lines: deque[Mapping[str, Any]] = deque(maxlen=RATE_STEPS)
        self._status: Mapping[str, Any] = {}
        self._rows: tuple[ServiceRow, ...] = ()
        self._warnings: tuple[str, ...] = ()
        self._stopping = False
        self._last_step = time.monotonic()

    def note(self, text: str) -> None:
        """Print a line above the view, unless it is empty."""
        if text:
            self._console.print(Text(printable(text)), soft_wrap=True)

    def say_stopping(self, at_once: bool) -> None:
        """Report that a signal ends the run, and show that state in the view."""
        super().say_stopping(at_once)
        self._stopping = True

    async def watch_loop(self, ledger: Ledger, children: Mapping[Any, Sequence[Supervised]]) -> None:
        """Redraw the view until cancelled; the last state stays on the screen."""
        with Live(console=self._console, auto_refresh=False) as live, _logging_above(live):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(super().watch_loop(ledger, children), name="progress.steps")
                tasks.create_task(self._ask_loop(ledger, children), name="progress.ask")
                try:
                    while True:
                        live.update(render_view(self.view()), refresh=True)
                        await asyncio.sleep(REDRAW_S)
                finally:
                    self._print_steps(0)
                    live.update(render_view(self.view()), refresh=True)

    def view(self) -> RunView:
        """Return the current view of the run."""
        bound = self._status.get("bound")
        version = int(self._lines[-1]["version"] if self._lines else self._status.get("version", 0))
        return RunView(
            run=self._run,
            state=self._state(version),
            version=version,
            steps=self._steps,
            seconds=time.monotonic() - self._began,
            bound="E={max_staleness} B={groups_per_step} {policy}".format(**bound) if bound else "",
            services=self._rows,
            lines=tuple(self._lines),
            since_step_s=time.monotonic() - self._last_step,
            warnings=self._warnings,
        )

    def _state(self, version: int) -> str:
        if not self._status or all(row.state in (STARTS, MISSING) for row in self._rows):
            return "starting"
        if version >= self._steps:
            return "done"
        return "draining" if self._stopping else str(self._status["run_state"])

    async def _ask_loop(self, ledger: Ledger, children: Mapping[Any, Sequence[Supervised]]) -> None:
        began = time.monotonic()
        while True:
            expected = expected_processes(children)
            warnings = [f"{name} was restarted {count} times" for name, count in expected.items() if count]
            try:
                peers = await ledger.peers()
                warnings += scaled_to_zero(peers, children)
                self._rows = tuple(service_rows(peers, expected, time.monotonic() - began))
                self._status = await collect_status(ledger)
            except TetherError as error:
                warnings.append(f"the ledger does not answer: {error}")
            if self._lines and self._lines[-1].get("skipped"):
                warnings.append(f"step {self._lines[-1]['step']} was skipped: {self._lines[-1]['skipped']}")
            warnings += self._lines[-1].get("warnings", ()) if self._lines else ()
            self._warnings = tuple(warnings)
            await asyncio.sleep(ASK_S)

    def _print_steps(self, restarts: int) -> None:
        lines = self._new_steps()
        self._lines.extend(lines)
        if lines:
            self._last_step = time.monotonic()
        for warning in (text for line in lines for text in line.get("warnings", ())):
            self.note(f"warning: {warning}")

    async def _describe_quiet(self, ledger: Ledger, children: Mapping[Any, Sequence[Supervised]]) -> str:
        return ""  # the view shows it


@contextlib.contextmanager
def _logging_above(live: Live) -> Iterator[None]:
    """Redirect log lines from standard error to above the view, during the block."""
    handlers = [item for item in logging.getLogger().handlers if isinstance(item, logging.StreamHandler)]
    before = [item.setStream(_Above(live)) for item in handlers]
    try:
        yield
    finally:
        for handler, stream in zip(handlers, before, strict=True):
            if stream is not None:
                handler.setStream(stream)


class _Above:
    """Stream that prints lines above a live view."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def write(self, text: str) -> None:
        if text.strip():
            self._live.console.print(Text(printable(text.rstrip("\n"))), soft_wrap=True)

    def flush(self) -> None:
        """Return at once: the console writes immediately."""

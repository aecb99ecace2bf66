"""Tests when a view is drawn, and that notes and log lines are printed above it, on a ledger in memory."""

import asyncio
import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import pytest

from protocol.messages import StepReport
from protocol.topics import Role
from services.launcher.live_progress import LiveProgress, is_interactive, open_progress
from services.ledger.interface import Peer
from services.run_record.progress import Progress
from services.run_record.steps import StepLog
from tests.contracts.ledger_rig import Driver, MemoryRig


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@dataclass
class Child:
    """A process that a supervisor keeps."""

    name: str
    restarts: int = 0
    registers: bool = True


@pytest.mark.parametrize(
    ("environ", "is_drawn"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({}, False),
    ],
)
def test_view_is_drawn_on_terminals_only(environ: dict[str, str], is_drawn: bool) -> None:
    assert is_interactive(Terminal(), environ) is is_drawn
    assert not is_interactive(io.StringIO(), environ)


def test_progress_in_a_pipe_is_plain(tmp_path: Path) -> None:
    assert type(open_progress("r", tmp_path, 3, io.StringIO())) is Progress


def unread_pipe() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def left_terminal() -> TextIO:
    reader, writer = os.openpty()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("stream", [unread_pipe, left_terminal])
def test_lines_that_nobody_reads_any_more_are_left_out(stream: Callable[[], TextIO], tmp_path: Path) -> None:
    with stream() as out:  # its end writes what is buffered
        progress = open_progress("r", tmp_path, 3, out)
        progress.note("first")
        progress.say_stopping(at_once=True)


def test_lines_for_which_a_disk_has_no_room_are_left_out(tmp_path: Path) -> None:
    out = open("/dev/full", "w")  # noqa: SIM115 (its end fails, too)
    open_progress("r", tmp_path, 3, out).note("first")
    with contextlib.suppress(OSError):
        out.close()


def test_characters_that_the_output_lacks_are_escaped(tmp_path: Path) -> None:
    with io.TextIOWrapper(io.BytesIO(), "ascii") as out:
        open_progress("r", tmp_path, 3, out).note("0.5 \u00b1 0.1")
        out.seek(0)
        assert out.read() == "0.5 \\xb1 0.1\n"


async def test_view_is_redrawn_below_notes_and_log_lines(tmp_path: Path) -> None:
    driver = await Driver(MemoryRig()).begin()
    await driver.ledger.register(
        Peer("trainer", "t", {"name": "trainer", "work": {"step 1": (1, 7.0)}}), 60_000
    )
    StepLog(tmp_path / "metrics.jsonl").append(StepReport(step=0, version=1, epoch="e1", reward_mean=0.125))
    out = Terminal()
    progress = LiveProgress("demo", tmp_path, 100, out)
    StepLog(tmp_path / "metrics.jsonl").append(StepReport(step=1, version=2, epoch="e1", reward_mean=0.625))
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    try:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(
                progress.watch_loop(driver.ledger, {"trainer": [Child("trainer", 2)], Role.ROLLOUT: []})
            )
            while "was restarted" not in out.getvalue():  # noqa: ASYNC110 (the output is asked)
                await asyncio.sleep(0.01)
            logging.getLogger("tether.up").warning("service.died name=trainer")
            progress.say_stopping(at_once=False)
            watching.cancel()
        assert handler.stream is sys.stderr
    finally:
        logging.getLogger().removeHandler(handler)
    text = out.getvalue()
    assert "service.died name=trainer" in text
    assert "draining: finishing what is in flight; Ctrl-C again to stop now" in text
    assert "0.625" in text
    assert "0.125" not in text  # a step of an earlier start
    view = progress.view()
    assert (view.state, view.version, view.services[0].text) == ("draining", 2, "step 1")
    scaled = "rollouts are scaled to 0: no step is made without one"
    assert view.warnings == ("trainer was restarted 2 times", scaled)

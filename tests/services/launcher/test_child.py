"""Tests `SupervisedProcess` with real child processes.

Each child connects to a socket and keeps the connection open as long as it lives.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from protocol.errors import SettingsError
from services.launcher.child import (
    BACKOFF_S,
    MAX_LOG_BYTES,
    ServiceFailed,
    ServiceSpec,
    SupervisedProcess,
    backoff_s,
    cut_log,
    last_log_line,
    older_log,
)
from tests.changes import slow_unless_changed
from tests.integration.loop import ROOT
from tests.services.bus.harness import eventually
from tests.services.launcher.patient_spares import PROGRAM, PatientSpares, kept_spares


@dataclass
class Caller:
    """A program that has called in."""

    pid: int
    helper: int
    """A process that it has started."""
    instance: str
    _reader: asyncio.StreamReader

    async def gone(self) -> None:
        """Return once the program and its helper have ended."""
        async with asyncio.timeout(30):
            await self._reader.read()


class Roll:
    """The socket that programs call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._callers: asyncio.Queue[Caller] = asyncio.Queue()
        self._writers: list[asyncio.StreamWriter] = []

    async def enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        if not (line := await reader.readline()):  # killed as it called
            return
        facts: dict[str, Any] = json.loads(line)
        self._callers.put_nowait(Caller(_reader=reader, **facts))

    async def caller(self) -> Caller:
        """The next program that calls in."""
        async with asyncio.timeout(60):
            return await self._callers.get()

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
            await writer.wait_closed()


@pytest.fixture
async def roll(tmp_path: Path) -> AsyncIterator[Roll]:
    roll = Roll(tmp_path / "roll")
    async with await asyncio.start_unix_server(roll.enter, roll.path):
        yield roll
        await roll.close()


@pytest.fixture(
    params=[
        "anew",
        pytest.param(
            "from a spare",
            marks=slow_unless_changed("services/launcher/", "services/spare.py", "services/runtime/"),
        ),
    ]
)
async def make(
    tmp_path: Path, roll: Roll, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., SupervisedProcess]]:
    """Makes children that are started anew each time, or were spares each time."""
    monkeypatch.setattr("services.launcher.spare.REPLACE_DELAY_S", 0.0)
    monkeypatch.setattr("services.launcher.child.EARLY_EXIT_S", 0.0)
    spares = None if request.param == "anew" else PatientSpares(tmp_path)

    def child(
        behaviour: str, *, restarts: int = 2, finishes: bool = False, optional: bool = False
    ) -> SupervisedProcess:
        environ = {"BEHAVIOUR": behaviour, "ROLL": str(roll.path), "PYTHONPATH": str(ROOT)}
        return SupervisedProcess(
            ServiceSpec("worker.0", PROGRAM, environ, finishes, optional),
            tmp_path / "worker.0.log",
            restarts,
            spares=spares,
        )

    if spares is None:
        yield child
        return
    async with kept_spares(spares):
        yield child


@asynccontextmanager
async def kept(child: SupervisedProcess) -> AsyncIterator[asyncio.Task[None]]:
    """Keep a child running for the block, which has to stop it."""
    async with asyncio.timeout(90), asyncio.TaskGroup() as tasks:
        yield tasks.create_task(child.keep_running())


async def test_a_child_knows_its_name_and_leads_a_session(
    make: Callable[..., SupervisedProcess], roll: Roll
) -> None:
    child = make("serve")
    async with kept(child):
        caller = await roll.caller()
        assert (caller.instance, caller.pid) == ("worker.0", child.pid)
        assert os.getsid(caller.pid) == caller.pid
        await child.stop(60)
    assert child.pid is None


async def test_a_killed_child_is_started_again_and_leaves_nothing(
    make: Callable[..., SupervisedProcess], roll: Roll
) -> None:
    child = make("serve")
    async with kept(child):
        first = await roll.caller()
        os.kill(first.pid, signal.SIGKILL)
        second = await roll.caller()
        await first.gone()
        assert second.pid == child.pid != first.pid
        assert child.restarts == 1
        await child.stop(60)
        await second.gone()


async def test_a_child_that_dies_too_often_ends_the_run(make: Callable[..., SupervisedProcess]) -> None:
    child = make("3 out of cheese", restarts=2)
    with pytest.raises(ServiceFailed) as failure:
        await child.keep_running()
    assert str(failure.value) == (
        f"worker.0 died 3 times in a minute, last with exit code 3: out of cheese (see {child.log_path})"
    )
    assert child.log_path.read_text() == "out of cheese\n" * 3


async def test_a_child_that_dies_of_one_error_again_and_again_ends_the_run(
    make: Callable[..., SupervisedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.launcher.child.RESTART_WINDOW_S", 0.0)  # as if each lived for a minute
    child = make("1 out of cheese", restarts=2)
    with pytest.raises(ServiceFailed) as failure:
        await child.keep_running()
    assert str(failure.value) == (
        "worker.0 died 3 times in a row with the same error, last with exit code 1: out of cheese "
        f"(see {child.log_path})"
    )


async def test_the_end_of_a_log_in_an_error_does_not_make_it_another_one(
    make: Callable[..., SupervisedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.launcher.child.RESTART_WINDOW_S", 0.0)
    child = make("1 engine rollout.0: the server ended at its start, with code 1: LOG", restarts=2)
    with pytest.raises(ServiceFailed, match="died 3 times in a row with the same error"):
        async with asyncio.timeout(60):
            await child.keep_running()


async def test_an_end_without_a_word_is_not_blamed_on_an_earlier_one(
    make: Callable[..., SupervisedProcess],
) -> None:
    child = make("3 ", restarts=0)
    child.log_path.write_text("tether worker: setting x is wrong\n")
    with pytest.raises(ServiceFailed, match="last with exit code 3: no output"):
        await child.keep_running()


async def test_a_large_log_is_put_aside_before_a_start(make: Callable[..., SupervisedProcess]) -> None:
    child = make("3 out of cheese", restarts=0)
    with child.log_path.open("wb") as log:
        log.truncate(MAX_LOG_BYTES + 1)
    with pytest.raises(ServiceFailed, match="out of cheese"):
        await child.keep_running()
    assert child.log_path.read_text() == "out of cheese\n"
    assert older_log(child.log_path).stat().st_size == MAX_LOG_BYTES + 1


async def test_a_log_is_cut_while_its_service_runs_and_the_last_line_is_still_known(
    make: Callable[..., SupervisedProcess], roll: Roll, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.launcher.child.LOG_CHECK_S", 0.01)
    child = make("serve", restarts=0, optional=True)
    async with kept(child):
        caller = await roll.caller()
        with child.log_path.open("ab") as log:
            log.truncate(MAX_LOG_BYTES)
            log.write(b"\nout of cheese\n")
        await eventually(lambda: child.log_path.stat().st_size == 0)
        os.kill(caller.pid, signal.SIGKILL)
    assert "out of cheese" in child.failure_reason


def test_who_appends_to_a_log_goes_on_at_its_new_end(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    for turn in ("one", "two"):
        with path.open("ab", buffering=0) as log:
            log.write(turn.encode())
            assert not cut_log(path, limit=3)
            log.write(b" lines")
            assert cut_log(path, limit=3)
            log.write(b"next")
        assert (older_log(path).read_text(), path.read_text()) == (f"{turn} lines", "next")
        path.unlink()


def test_a_service_that_has_run_well_for_a_while_is_started_at_once_again() -> None:
    assert [backoff_s(deaths) for deaths in (1, 2, 3)] == [0.2, 0.4, 0.8]
    assert backoff_s(10**6) == BACKOFF_S[1]


async def test_wrong_settings_are_not_tried_again(make: Callable[..., SupervisedProcess]) -> None:
    child = make("2 tether worker: setting x is wrong")
    with pytest.raises(SettingsError, match=r"^worker: setting x is wrong$"):
        await child.keep_running()
    assert child.restarts == 0


async def test_wrong_settings_without_output_name_the_log(make: Callable[..., SupervisedProcess]) -> None:
    child = make("2 ")
    with pytest.raises(SettingsError, match=r"worker\.0: wrong settings, see .*worker\.0\.log"):
        await child.keep_running()


async def test_an_optional_child_that_dies_too_often_is_given_up(
    make: Callable[..., SupervisedProcess], caplog: pytest.LogCaptureFixture
) -> None:
    for behaviour, cause in (
        ("3 out of cheese", "died 2 times in a minute"),
        ("2 tether: no cheese", "no cheese"),
    ):
        child = make(behaviour, restarts=1, optional=True)
        await child.keep_running()
        assert child.finished.is_set()
        assert cause in child.failure_reason
        assert f"service.given_up name=worker.0 reason={child.failure_reason}" in caplog.text


async def test_work_that_is_done_is_not_started_again(make: Callable[..., SupervisedProcess]) -> None:
    child = make("0 done", finishes=True)
    await child.keep_running()
    assert child.finished.is_set()
    assert child.restarts == 0


async def test_a_kill_leaves_alone_who_has_the_number_of_a_child_that_has_ended(
    make: Callable[..., SupervisedProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    child, killed = make("0 done", finishes=True), list[int]()
    await child.keep_running()
    monkeypatch.setattr(os, "killpg", lambda group, signum: killed.append(group))
    child.kill()
    assert killed == []


async def test_a_service_that_just_ends_is_started_again(make: Callable[..., SupervisedProcess]) -> None:
    with pytest.raises(ServiceFailed, match="exit code 0"):
        await make("0 bye", restarts=1).keep_running()


async def test_stop_lets_a_child_drain_and_ends_what_it_started(
    make: Callable[..., SupervisedProcess], roll: Roll
) -> None:
    child = make("serve")
    async with kept(child) as keeping:
        caller = await roll.caller()
        await child.stop(60)
        await caller.gone()
        await keeping
    assert child.log_path.read_text() == "drained\n"
    assert child.finished.is_set()


async def test_stop_kills_a_child_that_does_not_drain(
    make: Callable[..., SupervisedProcess], roll: Roll
) -> None:
    child = make("stubborn")
    async with kept(child):
        caller = await roll.caller()
        await child.stop(0.1)
        await caller.gone()
    assert child.pid is None


async def test_a_child_that_is_stopped_while_it_starts_does_not_stay(
    make: Callable[..., SupervisedProcess],
) -> None:
    child = make("stubborn")
    async with kept(child):
        await asyncio.sleep(0)
        await child.stop(60)
    assert child.pid is None


async def test_a_cancelled_keeper_leaves_nothing(make: Callable[..., SupervisedProcess], roll: Roll) -> None:
    child = make("stubborn")
    async with kept(child) as keeping:
        caller = await roll.caller()
        keeping.cancel()
        await caller.gone()


async def test_a_child_drains_when_its_supervisor_is_killed(tmp_path: Path, roll: Roll) -> None:
    environ = {**os.environ, "BEHAVIOUR": "serve", "ROLL": str(roll.path), "PYTHONPATH": str(ROOT)}
    log = tmp_path / "orphan.log"
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.services.launcher.child_parent", str(log), env=environ, cwd=ROOT
    )
    caller = await roll.caller()
    spare = await waiting_spare(parent.pid, besides=caller.pid)
    os.kill(caller.helper, signal.SIGKILL)  # a service ends its own helpers; this one's knows nothing of that
    parent.kill()
    await parent.wait()
    await caller.gone()
    assert log.read_text() == "drained\n"
    await eventually(lambda: not psutil.pid_exists(spare))


async def waiting_spare(parent: int, besides: int) -> int:
    """The pid of the spare that a supervisor has started after the child."""
    found: set[int] = set()

    def is_there() -> bool:
        found.update({child.pid for child in psutil.Process(parent).children()} - {besides})
        return bool(found)

    await eventually(is_there)
    return found.pop()


def test_last_log_line_is_the_last_one_that_is_not_empty(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"first\nlast \xff line\n\n  \n")
    assert last_log_line(log) == "last \ufffd line"
    assert last_log_line(log, limit=4) == "last"
    assert last_log_line(log, start=6) == "last \ufffd line"
    assert last_log_line(log, start=log.stat().st_size) == ""
    assert last_log_line(tmp_path / "none.log") == ""

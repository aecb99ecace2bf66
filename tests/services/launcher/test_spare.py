"""Tests how spares are kept: one for each kind, which forks services; none after too many failures."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services.launcher import spare
from services.launcher.child import ServiceSpec, SupervisedProcess
from services.launcher.session import ForkedProcess, kill_session
from services.launcher.spare import Spare, Spares
from tests.changes import slow_unless_changed
from tests.services.bus.harness import eventually
from tests.services.launcher.patient_spares import PROGRAM, kept_spares

pytestmark = slow_unless_changed("services/launcher/", "services/spare.py", "services/runtime/")

THREADED = "tests.services.threaded_program"
PYTHONPATH = {"PYTHONPATH": os.getcwd()}


@pytest.fixture
def spares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spares:
    monkeypatch.setattr(spare, "REPLACE_DELAY_S", 0.0)
    monkeypatch.setattr(spare, "RETRY_S", 0.0)
    return Spares(tmp_path)


def waiting(spares: Spares) -> list[int]:
    """Pids of the spares that are ready."""
    return [ready.process.pid for ready in spares._ready.values()]


async def test_services_of_one_kind_are_forks_of_one_spare_which_stays(
    spares: Spares, tmp_path: Path
) -> None:
    one, other = {**PYTHONPATH, "BEHAVIOUR": "0 one"}, {**PYTHONPATH, "BEHAVIOUR": "0 other"}
    for name, environ in (("worker.0", one), ("worker.1", one), ("worker.2", other)):
        spares.add(name, PROGRAM, environ)
    async with kept_spares(spares):
        await eventually(lambda: len(waiting(spares)) == 2)
        before = waiting(spares)
        for _ in range(2):
            process = await spares.take("worker.1", PROGRAM, one, tmp_path / "worker.1.log")
            assert process is not None
            assert await process.wait() == process.returncode == 0
            assert process.pid not in before
        assert (tmp_path / "worker.1.log").read_text() == "one\none\n"
        assert waiting(spares) == before
        assert await spares.take("worker.3", PROGRAM, PYTHONPATH, tmp_path / "worker.3.log") is None
        left = waiting(spares)
    assert not any(psutil.pid_exists(pid) for pid in left)
    assert sorted(path.name for path in tmp_path.glob("spare.*")) == [
        "spare.worker.0.log",
        "spare.worker.2.log",
    ]


async def test_a_spare_that_cannot_fork_becomes_the_service_and_is_replaced(
    spares: Spares, tmp_path: Path
) -> None:
    spares.add("worker.0", THREADED, PYTHONPATH)
    async with kept_spares(spares):
        await eventually(lambda: bool(waiting(spares)))
        (first,) = waiting(spares)
        process = await spares.take("worker.0", THREADED, PYTHONPATH, tmp_path / "worker.0.log")
        assert process is not None
        assert (process.pid, await process.wait()) == (first, 7)
        await eventually(lambda: bool(waiting(spares)) and waiting(spares) != [first])


async def test_a_service_outlives_the_spare_that_forked_it(spares: Spares, tmp_path: Path) -> None:
    environ = {**PYTHONPATH, "BEHAVIOUR": "serve", "ROLL": str(tmp_path / "roll")}
    spares.add("worker.0", PROGRAM, environ)
    with socket.socket(socket.AF_UNIX) as roll:
        roll.bind(environ["ROLL"])
        roll.listen()
        await serve_and_outlive(spares, environ, tmp_path / "worker.0.log", roll)
    assert (tmp_path / "worker.0.log").read_text() == "drained\n"


async def serve_and_outlive(spares: Spares, environ: dict[str, str], log: Path, roll: socket.socket) -> None:
    """Kill the spare whose fork calls `roll`, and then drain the fork."""
    async with kept_spares(spares):
        await eventually(lambda: bool(waiting(spares)))
        (first,) = waiting(spares)
        process = await spares.take("worker.0", PROGRAM, environ, log)
        assert process is not None
        caller, _ = await asyncio.to_thread(roll.accept)
        with caller:
            os.kill(first, signal.SIGKILL)
            await eventually(lambda: bool(waiting(spares)) and waiting(spares) != [first])
            assert process.returncode is None
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
            kill_session(process)


async def test_a_spare_that_does_not_fork_in_time_is_killed_and_makes_no_service(
    spares: Spares, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare, "ORDER_S", 0.1)
    environ, log = {**PYTHONPATH, "BEHAVIOUR": "0 one"}, tmp_path / "worker.0.log"
    spares.add("worker.0", PROGRAM, environ)
    async with kept_spares(spares):
        await eventually(lambda: bool(waiting(spares)))
        (first,) = waiting(spares)
        os.kill(first, signal.SIGSTOP)
        assert await spares.take("worker.0", PROGRAM, environ, log) is None
        await eventually(lambda: bool(waiting(spares)) and waiting(spares) != [first])
    assert not log.exists()


async def test_spares_that_do_not_fork_are_given_up(
    spares: Spares, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare, "ORDER_S", 0.1)
    seen: list[int] = []
    spares.add("worker.0", PROGRAM, PYTHONPATH)
    async with kept_spares(spares):
        for _ in range(spare.MAX_TRIES):
            await eventually(lambda before=seen: bool(waiting(spares)) and waiting(spares) != before)
            seen = waiting(spares)
            os.kill(seen[0], signal.SIGSTOP)
            assert await spares.take("worker.0", PROGRAM, PYTHONPATH, tmp_path / "worker.0.log") is None
        await eventually(lambda: f"tries={spare.MAX_TRIES}" in caplog.text)
        assert not spares._ready


async def test_a_spare_whose_fork_ends_without_its_order_is_replaced(
    spares: Spares, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ, log, fork = {**PYTHONPATH, "BEHAVIOUR": "0 one"}, tmp_path / "worker.0.log", spare._fork

    async def killed(parent: Spare) -> ForkedProcess:
        process = await fork(parent)
        kill_session(process)
        await process.wait()
        return process

    spares.add("worker.0", PROGRAM, environ)
    async with kept_spares(spares):
        await eventually(lambda: bool(waiting(spares)))
        (first,) = waiting(spares)
        with monkeypatch.context() as killing:
            killing.setattr(spare, "_fork", killed)
            process = await spares.take("worker.0", PROGRAM, environ, log)
        assert process is None or process.returncode == -signal.SIGKILL
        await eventually(lambda: bool(waiting(spares)) and waiting(spares) != [first])
        process = await spares.take("worker.0", PROGRAM, environ, log)
        assert process is not None
        assert await process.wait() == 0


async def test_a_fork_that_fails_at_once_is_followed_by_a_new_process(spares: Spares, tmp_path: Path) -> None:
    environ = {**PYTHONPATH, "BEHAVIOUR": "3 no"}
    spec = ServiceSpec("worker.0", PROGRAM, environ)
    spares.add("worker.0", PROGRAM, environ)
    async with kept_spares(spares):
        await eventually(lambda: bool(waiting(spares)))
        child = SupervisedProcess(spec, tmp_path / "worker.0.log", 2, spares=spares)
        kinds = []
        for _ in range(3):
            assert await child._run_once() == 3
            kinds.append(type(child._process))
    assert kinds == [ForkedProcess, asyncio.subprocess.Process, ForkedProcess]


async def test_a_fork_that_another_process_waits_for_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as other:
        other.wait()
        assert await ForkedProcess(other.pid).wait() == 255


async def test_a_spare_waits_until_the_run_has_begun(spares: Spares, tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def wait() -> None:
        await begun.wait()

    spares.add("worker.0", PROGRAM, PYTHONPATH)
    before = psutil.Process().children()
    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(spares.run(wait))
        await asyncio.sleep(0)
        assert psutil.Process().children() == before
        begun.set()
        await eventually(lambda: bool(waiting(spares)))
        keeping.cancel()


async def test_a_service_that_dies_waits_for_a_spare_that_imports_already(
    spares: Spares, tmp_path: Path
) -> None:
    environ, others = {**PYTHONPATH, "BEHAVIOUR": "0 one"}, set(psutil.Process().children())
    spares.add("worker.0", PROGRAM, environ)
    async with kept_spares(spares):
        await eventually(lambda: len(psutil.Process().children()) > len(others))
        assert not waiting(spares)
        (importing,) = {*psutil.Process().children()} - others
        process = await spares.take("worker.0", PROGRAM, environ, tmp_path / "worker.0.log")
        assert process is not None
        assert await process.wait() == 0
        assert waiting(spares) == [importing.pid]


async def test_a_service_does_not_wait_for_a_spare_that_hangs_in_its_imports(
    spares: Spares, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare, "IMPORT_WAIT_S", 0.1)
    environ, others = {**PYTHONPATH, "BEHAVIOUR": "0 one"}, set(psutil.Process().children())
    spares.add("worker.0", PROGRAM, environ)
    async with asyncio.timeout(60), kept_spares(spares):
        await eventually(lambda: len(psutil.Process().children()) > len(others))
        (importing,) = {*psutil.Process().children()} - others
        importing.suspend()
        spec = ServiceSpec("worker.0", PROGRAM, environ)
        child = SupervisedProcess(spec, tmp_path / "worker.0.log", 2, spares=spares)
        assert await child._run_once() == 0
        assert type(child._process) is asyncio.subprocess.Process
        assert "spare.late name=worker.0 seconds=0.1 instead=a new process" in caplog.text
        importing.resume()  # it was only slow: the next death has it
        await eventually(lambda: waiting(spares) == [importing.pid])


async def test_a_spare_that_was_killed_is_replaced_and_never_used(spares: Spares, tmp_path: Path) -> None:
    spares.add("worker.0", PROGRAM, PYTHONPATH)
    async with kept_spares(spares):
        await eventually(lambda: bool(waiting(spares)))
        (first,) = waiting(spares)
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: bool(waiting(spares)) and waiting(spares) != [first])


async def test_spares_that_cannot_import_are_given_up_and_their_log_says_why(
    spares: Spares, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spares.add("worker.0", "tests.no_such", PYTHONPATH)
    async with kept_spares(spares):
        await eventually(lambda: f"tries={spare.MAX_TRIES}" in caplog.text)
        assert await spares.take("worker.0", "tests.no_such", PYTHONPATH, tmp_path / "worker.0.log") is None
    assert caplog.text.count("spare.died name=worker.0") == spare.MAX_TRIES
    assert "No module named 'tests.no_such'" in (tmp_path / "spare.worker.0.log").read_text()


async def test_no_spare_is_started_without_memory_for_it(
    spares: Spares, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare, "MIN_FREE_BYTES", 1 << 60)
    spares.add("worker.0", PROGRAM, PYTHONPATH)
    before = psutil.Process().children()
    async with kept_spares(spares):
        await eventually(lambda: "spare.no_memory name=worker.0" in caplog.text)
        assert psutil.Process().children() == before

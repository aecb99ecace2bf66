"""Tests the process that waits to become a service."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protocol.host.prctl import adopting_orphans
from services.spare import FORKS, READY, preload
from tests.changes import slow_unless_changed
from tests.integration.command import environment
from tests.integration.loop import ROOT
from tests.services import spare_program

pytestmark = slow_unless_changed(
    "services/launcher/", "services/spare.py", "services/runtime/", "tests/services/spare_program.py"
)

PROGRAM = "tests.services.spare_program"
LIMIT_S = 60.0


@contextmanager
def spare(
    log: Path, module: str = PROGRAM, said: bytes = FORKS
) -> "Iterator[tuple[subprocess.Popen[bytes], socket.socket]]":
    """A spare that is ready."""
    mine, its = socket.socketpair()
    mine.settimeout(LIMIT_S)
    with mine, its, log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.spare", module],
            cwd=ROOT,
            env=environment(TETHER_RUN="early", TETHER_INSTANCE="spare"),
            stdin=its,
            stdout=output,
            stderr=output,
        )
        try:
            its.close()
            assert mine.recv(64) == said, log.read_text()
            yield process, mine
        finally:
            process.kill()
            process.wait(LIMIT_S)


def order(name: str, log: Path) -> bytes:
    return json.dumps({"name": name, "log": str(log)}).encode() + b"\n"


def fork_of(pipe: socket.socket) -> int:
    """Have a spare fork; returns the pid of the fork, which is a child of this process."""
    with adopting_orphans():
        pipe.sendall(b"\n")
        return int(pipe.recv(64))


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_forks_of_a_spare_become_the_services_that_lines_name(tmp_path: Path) -> None:
    ready_at, all_facts = time.time(), []
    with spare(tmp_path / "spare.log") as (process, pipe):
        for name in ("worker.7", "worker.8"):
            log = tmp_path / f"{name}.log"
            log.write_text("before\n")
            pid = fork_of(pipe)
            assert os.getsid(pid) == pid != process.pid
            pipe.sendall(order(name, log))
            assert ended(pid) == 7
            first, said = log.read_text().splitlines()
            facts = json.loads(said)
            assert first == "before"
            assert facts["age_s"] < time.time() - ready_at
            assert (facts["instance"], facts["left"], facts["arguments"]) == (name, None, [])
            assert (facts["stdin"], facts["sockets"]) == ("", 0)
            all_facts.append(facts)
    assert len({tuple(facts["drawn"]) for facts in all_facts}) == 2
    assert (tmp_path / "spare.log").read_text() == "preloaded for early\n"


def test_a_spare_that_cannot_fork_becomes_the_service_itself(tmp_path: Path) -> None:
    with spare(tmp_path / "spare.log", "tests.services.threaded_program", READY) as (process, pipe):
        pipe.sendall(order("worker.7", tmp_path / "worker.7.log"))
        assert process.wait(LIMIT_S) == 7
        assert pipe.recv(1) == b""


def test_a_process_that_has_opened_a_gpu_cannot_fork() -> None:
    code = "from services import spare; spare.DEVICES = ({!r},); print(spare.can_fork())"
    for devices, answer in (("/dev/nvidia", "True"), ("/dev/null", "False")):
        words = [sys.executable, "-c", code.format(devices)]
        done = subprocess.run(
            words, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.stdout.split() == [answer]


def test_a_fork_without_an_order_ends_with_the_socket(tmp_path: Path) -> None:
    with spare(tmp_path / "spare.log") as (process, pipe):
        pid = fork_of(pipe)
        process.kill()
        pipe.close()
        assert ended(pid) == 0


def test_a_fork_that_is_not_adopted_ends(tmp_path: Path) -> None:
    with spare(tmp_path / "spare.log") as (process, pipe):
        pipe.sendall(b"\n")
        pipe.shutdown(socket.SHUT_WR)
        assert pipe.recv(64) == b""
        assert process.wait(LIMIT_S) == 0


def test_a_spare_ends_with_the_process_that_keeps_it(tmp_path: Path) -> None:
    with spare(tmp_path / "spare.log") as (process, pipe):
        pipe.close()
        assert process.wait(LIMIT_S) == 0


def test_a_spare_that_cannot_import_its_service_says_why_and_ends(tmp_path: Path) -> None:
    log = tmp_path / "spare.log"
    with (
        pytest.raises(AssertionError, match=r"No module named 'services\.no_such"),
        spare(log, "services.no_such"),
    ):
        pass


def test_preloading_hands_the_settings_to_the_service(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TETHER_RUN", "mine")
    monkeypatch.setenv(spare_program.MARK, "")
    preload(PROGRAM)
    assert os.environ[spare_program.MARK] == "mine"
    assert capsys.readouterr().out == "preloaded for mine\n"


def test_preloading_a_package_imports_its_service() -> None:
    code = "import sys; from services.spare import preload; preload('services.ingest'); print(*sys.modules)"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "services.ingest.service" in loaded
    assert "torch" not in loaded
    assert "services.ingest.__main__" not in loaded

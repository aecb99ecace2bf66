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

from services.spare import READY, preload
from tests.integration.command import environment
from tests.integration.loop import ROOT
from tests.services import spare_program

PROGRAM = "tests.services.spare_program"
LIMIT_S = 60.0


@contextmanager
def spare(log: Path, module: str = PROGRAM) -> "Iterator[tuple[subprocess.Popen[bytes], socket.socket]]":
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
            assert mine.recv(64) == READY, log.read_text()
            yield process, mine
        finally:
            process.kill()
            process.wait(LIMIT_S)


def test_a_spare_becomes_the_service_that_a_line_names(tmp_path: Path) -> None:
    log = tmp_path / "worker.7.log"
    log.write_text("before\n")
    ready_at = time.time()
    with spare(tmp_path / "spare.log") as (process, pipe):
        pipe.sendall(json.dumps({"name": "worker.7", "log": str(log)}).encode() + b"\n")
        assert process.wait(LIMIT_S) == 7
        assert pipe.recv(1) == b""
    first, said = log.read_text().splitlines()
    facts = json.loads(said)
    assert first == "before"
    assert facts["age_s"] < time.time() - ready_at
    assert (facts["instance"], facts["left"], facts["arguments"]) == ("worker.7", None, [])
    assert (facts["stdin"], facts["sockets"]) == ("", 0)
    assert (tmp_path / "spare.log").read_text() == "preloaded for early\n"


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

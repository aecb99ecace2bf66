"""Compares forks of the server with processes that `subprocess` starts."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.host.prctl import tied_to_this_process
from services.settings.automatic import visible_gpus
from tests.changes import slow_unless_changed
from tests.integration.command import environment
from tests.warm import popen
from tests.warm.popen import ROOT, WarmPopen

pytestmark = slow_unless_changed("tests/warm/", "protocol/host/prctl", "services/settings/processes")
MODULE = "tests.warm.self_portrait"
WORDS = [sys.executable, "-m", MODULE, "one", "two words"]


@pytest.fixture(autouse=True)
def _own_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the program of these tests be forked, which is no service."""
    monkeypatch.setattr(popen, "FORKED", (*popen.FORKED, "tests.warm."))


def portrait(start: Callable[..., Any], tmp_path: Path, **options: Any) -> dict[str, Any]:
    """What the program says of itself."""
    log = tmp_path / f"{start.__name__}.log"
    environ = {**environment(), "TETHER_INSTANCE": "one", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = start(WORDS, cwd=ROOT, env=environ, stdout=output, stderr=output, **options)
        assert process.wait(60) == 3, log.read_text()
    lines = log.read_text().splitlines()
    facts: dict[str, Any] = json.loads(lines[0])
    assert facts.pop("pid") == process.pid
    assert facts.pop("parent") == os.getpid()
    assert Path(facts.pop("output")) == log
    assert lines[-1] == "to the errors"
    return facts


@pytest.mark.parametrize(
    "options",
    [{}, {"stdin": subprocess.DEVNULL, "start_new_session": True, "preexec_fn": tied_to_this_process()}],
)
def test_a_fork_is_what_a_new_process_is(tmp_path: Path, options: dict[str, Any]) -> None:
    forked = portrait(WarmPopen, tmp_path, **options)
    assert forked.pop("is_fork") is True
    executed = portrait(subprocess.Popen, tmp_path, **options)
    assert executed.pop("is_fork") is False
    assert forked == executed


def test_a_fork_can_be_killed_and_waited_for(tmp_path: Path) -> None:
    with WarmPopen(
        [*WORDS[:3], "wait"], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    ) as fork:
        try:
            assert json.loads(fork.stdout.readline())["is_fork"]
            assert fork.poll() is None
        finally:
            fork.send_signal(signal.SIGKILL)
        assert fork.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("words", "environ", "options"),
    [
        ([*WORDS[:2], "tests.other"], {}, {}),
        ([sys.executable, "-c", "pass"], {}, {}),
        (["/usr/bin/python3", *WORDS[1:]], {}, {}),
        (WORDS, {"OMP_NUM_THREADS": "7"}, {}),
        (WORDS, {"CUDA_VISIBLE_DEVICES": "7"}, {}),
        (WORDS, {}, {"cwd": "/"}),
    ],
)
def test_a_process_that_a_fork_would_not_be_is_none(
    words: list[str], environ: dict[str, str], options: dict[str, str]
) -> None:
    assert popen.can_be_forked(WORDS, ROOT, environment() | {"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"})
    assert not popen.can_be_forked(words, options.get("cwd", ROOT), {**environment(), **environ})


def test_to_hide_gpus_makes_a_difference_only_where_there_are_some() -> None:
    hidden = {**environment(), "CUDA_VISIBLE_DEVICES": ""}
    assert popen.can_be_forked(WORDS, ROOT, hidden) == (not visible_gpus(environment()))


def test_variables_that_a_library_sets_in_a_test_reach_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron and engines set such as they are made, and every later run was started anew for it."""
    popen.server_forks()
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    monkeypatch.setenv("LD_PRELOAD", "/nowhere.so")
    assert {"NVTE_FLASH_ATTN", "LD_PRELOAD"}.isdisjoint(environment())
    assert popen.can_be_forked(WORDS, ROOT, environment())


@pytest.mark.slow
def test_processes_are_started_anew_where_libraries_start_threads(tmp_path: Path) -> None:
    starts = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    (tmp_path / "sitecustomize.py").write_text(starts)
    program = (
        "import sys\n"
        "from tests.warm import popen\n"
        "words = [sys.executable, '-m', 'services.cli', '--help']\n"
        "variables = popen.server_variables()\n"
        "assert popen.can_be_forked(words, None, variables)\n"
        "assert popen.WarmPopen(words, env=variables).wait(60) == 0\n"
        "assert popen.ours.orders is None\n"
        "assert not popen.can_be_forked(words, None, variables)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environ, check=False, timeout=120)
    assert done.returncode == 0

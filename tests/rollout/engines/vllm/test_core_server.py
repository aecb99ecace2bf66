"""Tests the life of the server that engine processes are forked from; contract tests fork from it."""

import multiprocessing
import os
import subprocess
import sys
from multiprocessing import forkserver
from typing import Any

import psutil
import pytest

from rollout.engines.vllm import core_server
from rollout.engines.vllm.core_server import SWITCH, server_pid, start_server, stop_server
from tests.integration.loop import ROOT


def test_server_lives_until_its_last_user_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_server, "PRELOADED", ())
    monkeypatch.delenv(SWITCH, raising=False)
    stop_server_of_other_tests()
    one, other = object(), object()
    start_server(one)
    pid = server_pid()
    start_server(other)
    assert pid is not None
    assert server_pid() == pid
    with multiprocessing.get_context("forkserver").Pool(1) as forked:
        assert forked.apply(os.getppid) == pid
        assert forked.apply(os.getenv, (SWITCH,)) == "1"
    assert SWITCH not in os.environ
    for _ in range(2):
        stop_server(one)
        assert psutil.pid_exists(pid)
    stop_server(other)
    assert not psutil.pid_exists(pid)
    assert server_pid() is None


FORKED = """
import multiprocessing, os
from rollout.engines.vllm import core_server
core_server.PRELOADED = ("json.tool",)
if __name__ == "__main__":
    core_server.import_here()
    core_server.fork_server()
    pid = core_server.server_pid()
    assert open(f"/proc/{pid}/cmdline").read() == open("/proc/self/cmdline").read()
    context = multiprocessing.get_context("forkserver")
    with context.Pool(1) as forked:
        assert forked.apply(os.getppid) == pid
        assert forked.apply(os.getenv, (core_server.SWITCH,)) == "1"
        assert forked.apply(eval, ("'json.tool' in __import__('sys').modules",))
        lock = "__import__('multiprocessing.forkserver', fromlist='x')._forkserver._lock"
        assert forked.apply(eval, (f"{lock}.acquire(blocking=False)",))
    print(pid, flush=True)
    os._exit(0)
"""


def test_a_server_that_was_forked_forks_engines_and_ends_with_its_user() -> None:
    words = [sys.executable, "-c", FORKED]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    psutil.wait_procs([psutil.Process(pid) for pid in [int(done.stdout)] if psutil.pid_exists(pid)], 60)
    assert not psutil.pid_exists(int(done.stdout))


def stop_server_of_other_tests() -> None:
    """End a fork server that a test before has left in this process; it starts again where it is needed."""
    server: Any = forkserver
    server._forkserver._stop()

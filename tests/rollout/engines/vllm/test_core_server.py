"""Tests the life of the server that engine processes are forked from; contract tests fork from it."""

import multiprocessing
import os
from multiprocessing import forkserver
from typing import Any

import psutil
import pytest

from rollout.engines.vllm import core_server
from rollout.engines.vllm.core_server import SWITCH, server_pid, start_server, stop_server


def test_server_lives_until_its_last_user_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_server, "PRELOADED", ())
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


def stop_server_of_other_tests() -> None:
    """End a fork server that a test before has left in this process; it starts again where it is needed."""
    server: Any = forkserver
    server._forkserver._stop()

"""Runs a server that imports vLLM while this process does, and from which the engine process is forked.

Neither then waits for the other's ten seconds of imports. The server computes nothing and has no thread, so a
fork of it is safe. It is for eager engines of one rank on a CPU: nothing is compiled, no device is opened.
A process that has imported everything, and has one thread, forks the server instead of starting it.
"""

import importlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from typing import Any

from protocol.host.child_environment import with_variables

log = logging.getLogger("tether.rollout")

PRELOADED = (
    "rollout.engines.vllm.eager_core",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
)
"""Modules that the server imports. Not our worker module: it belongs into the engine process alone."""
SWITCH = "TORCHDYNAMO_DISABLE"
"""Environment variable that keeps torch from compiling."""

_users: set[object] = set()


def without_compiler() -> AbstractContextManager[None]:
    """Tell torch in processes that start meanwhile not to compile."""
    return with_variables({SWITCH: "1"})


def start_server(user: object) -> None:
    """Start the server, unless it runs, and keep it for `user`; returns at once."""
    _users.add(user)
    run_server()


def run_server() -> None:
    """Start the server, unless it runs, before anybody uses it; returns at once."""
    with without_compiler():
        multiprocessing.set_forkserver_preload(list(PRELOADED))
        forkserver.ensure_running()


def import_here() -> None:
    """Import in this process what the server imports; `without_compiler` has to be in force."""
    for name in PRELOADED:
        importlib.import_module(name)


def fork_server() -> None:
    """Start the server as a fork of this process, which has one thread, and has imported what it imports."""
    resource_tracker.ensure_running()  # a program of its own, which the server's start would begin
    module: Any = forkserver
    start = module.util.spawnv_passfds
    module.util.spawnv_passfds = _fork_and_run
    try:
        run_server()
    except OSError as error:  # no memory or no process left: vLLM's start tries again, and says so
        log.warning("engine.server_not_forked error=%r", error)
    finally:
        module.util.spawnv_passfds = start


def _fork_and_run(_path: str, words: Sequence[str], passed: Sequence[int]) -> int:
    """Do what `python -c CODE` with these descriptors would do, in a fork; return its pid."""
    if pid := os.fork():
        return pid
    try:
        for number in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, *passed}:
            with suppress(OSError):  # the listing's own
                os.close(number)
        _server()._lock = threading.Lock()  # it is locked, for the server's start
        exec(words[-1], {})
    finally:
        os._exit(1)


def stop_server(user: object) -> None:
    """End the server once it is unused; until then it reports the ends of the processes that it forked."""
    if user not in _users:
        return
    _users.discard(user)
    pid = server_pid()
    if not _users and pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it may be importing still
        _server()._stop()


def server_pid() -> int | None:
    """Return the server's process id, None if there is none."""
    pid: int | None = _server()._forkserver_pid
    return pid


@contextmanager
def forked_from_server(is_used: bool) -> Iterator[None]:
    """Have vLLM fork engine processes from the server, not start new interpreters, if it `is_used`."""
    from vllm.v1.engine import utils

    before = utils.get_mp_context
    if is_used:
        utils.get_mp_context = lambda: multiprocessing.get_context("forkserver")
    try:
        yield
    finally:
        utils.get_mp_context = before


def _server() -> Any:
    module: Any = forkserver
    return module._forkserver

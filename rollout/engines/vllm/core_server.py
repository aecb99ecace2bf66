"""Runs a fork server that imports vLLM in parallel to this process; the engine process is forked from it.

This overlaps the two imports of about ten seconds each. The server runs no computation and no threads, so
forking it is safe. It is used for eager single-rank engines on CPU, which compile no code and open no device.
A single-threaded process that has already imported everything forks the server instead of starting it.
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
"""Modules that the server imports. The worker module is excluded: it must be imported only in the engine
process."""
SWITCH = "TORCHDYNAMO_DISABLE"
"""Environment variable that disables torch.compile."""

_users: set[object] = set()


def without_compiler() -> AbstractContextManager[None]:
    """Disable torch's compiler in processes started inside the block."""
    return with_variables({SWITCH: "1"})


def start_server(user: object) -> None:
    """Start the server unless it runs, and keep it alive for `user`; return immediately."""
    _users.add(user)
    run_server()


def run_server() -> None:
    """Start the server unless it runs, before it has users; return immediately."""
    with without_compiler():
        multiprocessing.set_forkserver_preload(list(PRELOADED))
        forkserver.ensure_running()


def import_here() -> None:
    """Import the server's modules in this process; requires an active `without_compiler`."""
    for name in PRELOADED:
        importlib.import_module(name)


def fork_server() -> None:
    """Fork the server from this single-threaded process, which has imported the server's modules."""
    resource_tracker.ensure_running()  # separate process that the server's start would launch
    module: Any = forkserver
    start = module.util.spawnv_passfds
    module.util.spawnv_passfds = _fork_and_run
    try:
        run_server()
    except OSError as error:  # out of memory or processes: vLLM's start retries and reports the error
        log.warning("engine.server_not_forked error=%r", error)
    finally:
        module.util.spawnv_passfds = start


def _fork_and_run(_path: str, words: Sequence[str], passed: Sequence[int]) -> int:
    """Run the command `python -c CODE` in a fork with the given descriptors; return its pid."""
    if pid := os.fork():
        return pid
    try:
        for number in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, *passed}:
            with suppress(OSError):  # descriptor of the listing itself
                os.close(number)
        _server()._lock = threading.Lock()  # the lock is held during the server's start
        exec(words[-1], {})
    finally:
        os._exit(1)


def stop_server(user: object) -> None:
    """Stop the server after its last user; until then it reports the exits of its forks."""
    if user not in _users:
        return
    _users.discard(user)
    pid = server_pid()
    if not _users and pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it may still be importing
        _server()._stop()


def server_pid() -> int | None:
    """Return the server's pid; None if it does not run."""
    pid: int | None = _server()._forkserver_pid
    return pid


@contextmanager
def forked_from_server(is_used: bool) -> Iterator[None]:
    """If `is_used`, let vLLM fork engine processes from the server instead of starting new interpreters."""
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

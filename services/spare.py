"""Runs `python -m services.spare services.ROLE`: imports a service's modules and waits to start services.

`tether up` starts the spare with the environment of a service, and a socket as standard input. A waiting
spare holds no connection, lock, device or file of the run except its log. The spare forks a process for each
byte on the socket; a line on the socket turns the fork into the service, so imports happen only once. If
forks would not work (`can_fork`), the spare itself becomes the service. The spare ends with the socket or
with `tether up`.
"""

import gc
import importlib
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType

from protocol.host.prctl import die_with_parent
from services.runtime import start_time
from services.settings.load import load_settings

READY = b"ready\n"
"""Sent by the spare after its imports if it becomes the service itself."""
FORKS = b"forks\n"
"""Sent instead if the spare forks; each fork then sends its pid."""
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
"""Prefixes of GPU device files. A driver that has opened one does not work in a fork."""


def preload(module: str) -> Callable[[], None] | None:
    """Import a service, and the modules that its `preload` needs for the settings of the environment.

    Args:
        module: module started as `python -m MODULE`. A package's module is `MODULE.service`; its function
            `preload`, if defined, gets the settings.

    Returns: function that a fork must call before it becomes the service, if any.
    """
    spec = importlib.util.find_spec(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    service: ModuleType = importlib.import_module(f"{module}.service" if is_package else module)
    return service.preload(load_settings()) if hasattr(service, "preload") else None


def can_fork() -> bool:
    """Return whether a fork of this process works: it has one thread and has opened no GPU.

    The trial fork makes libraries with fork handlers, such as OpenBLAS, end their threads.
    """
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    try:
        threads, opened = os.listdir("/proc/self/task"), os.listdir("/proc/self/fd")
    except OSError:  # unknown on systems other than Linux
        return False
    files = [os.path.realpath(f"/proc/self/fd/{number}") for number in opened]
    return len(threads) == 1 and not any(file.startswith(DEVICES) for file in files)


def fork_spares(pipe: socket.socket, parent: int) -> socket.socket | None:
    """Fork a process for each received byte, until `pipe` or a fork without an order ends.

    Args:
        pipe: socket to `tether up`; a fork owns it until it has its order.
        parent: pid of `tether up`, which adopts the forks and with which they end.

    Returns: in a fork, the socket on which it signals that it has its order; None in this process.
    """
    gc.freeze()  # garbage collections in a fork then copy none of this process's pages
    while pipe.recv(1):
        own_end, peer_end = socket.socketpair()
        child = os.fork()
        if child == 0:
            own_end.close()
            if os.fork():
                os._exit(0)  # `tether up` adopts the grandchild
            peer_end.recv(1)
            _begin(parent)
            return peer_end
        peer_end.close()
        os.waitpid(child, 0)
        with own_end:
            own_end.sendall(b"\n")
            if not own_end.recv(1):  # the fork ended without an order, as later forks would
                break
    return None


def _release(busy: socket.socket) -> None:
    """Let the spare continue, since this fork has its order."""
    with busy, suppress(OSError):  # the spare has died
        busy.sendall(b"\n")


def _begin(parent: int) -> None:
    """Set up a fork like a process started by `tether up`."""
    os.setsid()
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    if "numpy.random" in sys.modules:  # forks would share a seed; Python reseeds only its own generator
        sys.modules["numpy.random"].seed()


def wait_and_become(
    module: str, pipe: socket.socket, ready: bytes, begin: Sequence[Callable[[], None]]
) -> None:
    """Report readiness, and run `module` once a line has named the service and its log.

    Args:
        module: module started as `python -m MODULE`.
        pipe: socket to `tether up`.
        ready: message that reports readiness.
        begin: functions called before `module` runs, with output already redirected to its log.
    """
    pipe.sendall(ready)
    with pipe, pipe.makefile("rb", buffering=0) as lines:  # later bytes are not for this process
        line = lines.readline()
    if not line:
        return
    order = json.loads(line)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    os.environ["TETHER_INSTANCE"] = order["name"]
    for call in begin:
        call()
    start_time.begin_now()
    sys.argv = [module]
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)  # avoids Python's warning when it runs again as `__main__`
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    """Run a spare of the service named on the command line."""
    module = sys.argv[1]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, forks could not be waited for
    pipe = socket.socket(fileno=os.dup(0))  # not inherited, so that child processes do not keep it open
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    environ, parent = dict(os.environ), os.getppid()
    first = preload(module)
    os.environ.clear()  # the service sets its variables itself, in its own order
    os.environ.update(environ)
    if not can_fork():
        wait_and_become(module, pipe, READY, [])
        return
    pipe.sendall(FORKS)
    if busy := fork_spares(pipe, parent):
        begin: list[Callable[[], None]] = [partial(_release, busy)]
        if first:
            begin.append(first)
        wait_and_become(module, pipe, b"%d\n" % os.getpid(), begin)


if __name__ == "__main__":
    main()

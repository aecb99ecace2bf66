"""Runs `python -m services.spare services.ROLE`: imports the service's modules, and waits to become it.

`tether up` starts it with the variables of a service, and a socket as its standard input. It holds nothing of
the run meanwhile: no connection, no lock, no file but its log, and no device. For each byte of the socket it
forks a process, which a line of the socket makes the service: the imports are done once. Where a fork would
not work (`can_fork`), it becomes the service itself. The end of the socket, or of `tether up`, ends it.
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
"""What the spare writes to the socket once it has imported everything, if it becomes the service itself."""
FORKS = b"forks\n"
"""What it writes instead if it forks; each process that it has forked writes its pid."""
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
"""How the names of GPUs' files begin. A driver that has opened one does not work in a fork."""


def preload(module: str) -> Callable[[], None] | None:
    """Import a service, and what it says itself that it will need with the settings of the environment.

    Args:
        module: started as `python -m MODULE`. A package's module is `MODULE.service`, whose function
            `preload`, if it has one, gets the settings.

    Returns: what a fork of this process has to do before it becomes the service, if anything.
    """
    spec = importlib.util.find_spec(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    service: ModuleType = importlib.import_module(f"{module}.service" if is_package else module)
    return service.preload(load_settings()) if hasattr(service, "preload") else None


def can_fork() -> bool:
    """Return whether a fork of this process works: it has one thread and has opened no GPU.

    Libraries that know of forks, as OpenBLAS does, end their threads before one: at a first one here.
    """
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    try:
        threads, opened = os.listdir("/proc/self/task"), os.listdir("/proc/self/fd")
    except OSError:  # not Linux: it cannot be known
        return False
    files = [os.path.realpath(f"/proc/self/fd/{number}") for number in opened]
    return len(threads) == 1 and not any(file.startswith(DEVICES) for file in files)


def fork_spares(pipe: socket.socket, parent: int) -> socket.socket | None:
    """Fork a process for each byte that comes, until `pipe` or a fork without an order ends.

    Args:
        pipe: the socket to `tether up`, which belongs to a fork until it has its order.
        parent: pid of `tether up`, which forks are children of and end with.

    Returns: in a fork, what it has to write a byte to once it has its order; in this process None.
    """
    gc.freeze()  # so that collections in a fork copy none of this process's pages
    while pipe.recv(1):
        mine, its = socket.socketpair()
        child = os.fork()
        if child == 0:
            mine.close()
            if os.fork():
                os._exit(0)  # `tether up` adopts what it leaves
            its.recv(1)
            _begin(parent)
            return its
        its.close()
        os.waitpid(child, 0)
        with mine:
            mine.sendall(b"\n")
            if not mine.recv(1):  # the fork has ended without an order, and later forks would as well
                break
    return None


def _release(busy: socket.socket) -> None:
    """Let the spare continue: this fork has its order."""
    with busy, suppress(OSError):  # the spare has died
        busy.sendall(b"\n")


def _begin(parent: int) -> None:
    """Make a fork what a process is that `tether up` has started."""
    os.setsid()
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    if "numpy.random" in sys.modules:  # forks would draw the same numbers; Python reseeds its own generator
        sys.modules["numpy.random"].seed()


def wait_and_become(
    module: str, pipe: socket.socket, ready: bytes, begin: Sequence[Callable[[], None]]
) -> None:
    """Say that this process is ready, and run `module` once a line has named the service and its log.

    Args:
        module: started as `python -m MODULE`.
        pipe: the socket to `tether up`.
        ready: what to say.
        begin: called before `module` runs, when the output goes to its log already.
    """
    pipe.sendall(ready)
    with pipe, pipe.makefile("rb", buffering=0) as lines:  # what follows the line is not for this process
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
        sys.modules.pop(module, None)  # it runs once more, as `__main__`, which Python otherwise warns about
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    """Be a spare of the service that the command line names."""
    module = sys.argv[1]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would leave no fork to wait for
    pipe = socket.socket(fileno=os.dup(0))  # so that no process that is started from here keeps it open
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

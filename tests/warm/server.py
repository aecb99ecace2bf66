"""Forks processes from one that has imported the product and its libraries: `python -m tests.warm.server FD`.

A test that starts `tether up` has a dozen Python processes import torch and transformers, which is most of
what the run costs. A fork has them at once, and is the started process in all that its parent, /proc and its
own code can see: pid, session, descriptors, directory, variables, command line, exit code. `tests.warm.popen`
is the other end.
"""

import ctypes
import gc
import importlib
import io
import os
import runpy
import signal
import socket
import sys

import msgspec

from protocol.host.prctl import die_with_parent, keep_private
from tests.warm import popen
from tests.warm.popen import Order

IMPORTED = (
    "services.cli", "services.launcher.supervisor", "services.launcher.live_progress",
    "services.trainer.service", "services.rollout.service", "services.evaluation.service",
    "services.ingest.service", "services.monitor.service", "services.reward", "services.spare",
    "services.tools.evaluate", "rollout.engines.hf.engine", "trainer.megatron.backend",
    "transformers.models.qwen2.modeling_qwen2", "torch.distributed.run",
)  # fmt: skip
"""What the services of a small run import."""


def main() -> None:
    """Import everything, then fork a process for each order of the socket until it ends."""
    server = socket.socket(fileno=int(sys.argv[1]))
    popen.be_server({name: value for name, value in os.environ.items() if name != popen.ROOM})
    for module in IMPORTED:
        importlib.import_module(module)
    if len(os.listdir("/proc/self/task")) > 1:  # a fork would have one of the threads
        server.send(popen.THREADS)
        return
    gc.freeze()  # so that collections in a fork copy none of this process's pages
    server.send(popen.READY)
    if order := serve(server):
        become(order)


def serve(server: socket.socket) -> Order | None:
    """Fork for each order; return it in the fork, which has its descriptors, and None at the end."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(server, 1 << 20, 3)
        if not data:
            return None
        order = msgspec.msgpack.decode(data, type=Order)
        adopted, is_adopted = os.pipe()
        child = os.fork()
        if child == 0:
            if os.fork():
                os._exit(0)  # the process that ordered adopts what it leaves
            os.close(is_adopted)
            os.read(adopted, 1)
            if os.getppid() != order.parent:
                os._exit(1)
            server.send(b"%d" % os.getpid())
            server.detach()
            take_descriptors(descriptors)
            return order
        os.close(adopted)
        os.waitpid(child, 0)
        os.close(is_adopted)
        for number in descriptors:
            os.close(number)


def take_descriptors(descriptors: list[int]) -> None:
    """Make these the standard ones, and close all others."""
    for standard, number in enumerate([os.dup(number) for number in descriptors]):
        os.dup2(number, standard)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def become(order: Order) -> None:
    """Be the process that was ordered, to its end."""
    if order.session:
        os.setsid()
    if order.tied:
        die_with_parent(signal.SIGTERM)
        if os.getppid() != order.parent:
            os._exit(1)
    if order.module in popen.STARTERS and "RANK" not in order.environ:
        popen.use_server(fork_server(), popen.server_variables())
    os.environ.clear()
    os.environ.update(order.environ)
    show(["-m", *order.words], order.environ)
    os.chdir(order.directory)
    os.umask(order.umask)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    sys.stdout = sys.__stdout__ = output(1, "strict")
    sys.stderr = sys.__stderr__ = output(2, "backslashreplace")
    if order.module.split(".")[0] == "services":
        keep_private()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    sys.argv = [order.module, *order.words[1:]]
    sys.orig_argv[1:] = ["-m", *order.words]
    if not hasattr(sys.modules.get(order.module), "__path__"):
        sys.modules.pop(order.module, None)  # it runs once more, as `__main__`
    runpy.run_module(order.module, run_name="__main__", alter_sys=True)


def fork_server() -> socket.socket:
    """Fork a server for the processes that this one will start, which ends with it; return its other end."""
    mine, its = socket.socketpair(type=socket.SOCK_SEQPACKET)
    mine.settimeout(popen.ANSWER_S)
    parent = os.getpid()
    if os.fork():
        its.close()
        return mine
    mine.close()
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    order = serve(its)
    if order is None:
        os._exit(0)
    become(order)
    sys.exit(0)


def output(number: int, errors: str) -> io.TextIOWrapper:
    """A text stream that writes what it is given at once, as with PYTHONUNBUFFERED."""
    return io.TextIOWrapper(
        io.FileIO(number, "w", closefd=False), encoding="utf-8", errors=errors, write_through=True
    )


def show(words: list[str], environ: dict[str, str]) -> None:
    """Write command line and variables to where /proc reads them, which is room that `popen` has left."""
    with open("/proc/self/stat") as file:
        first, end, variables, last = map(int, file.read().rpartition(")")[2].split()[45:49])
    for begin, length, texts in (
        (first, end - first, [sys.executable, *words]),
        (variables, last - variables, [f"{name}={value}" for name, value in environ.items()]),
    ):
        text = b"".join(os.fsencode(text) + b"\0" for text in texts)[:length]
        ctypes.memmove(begin, text.ljust(length, b"\0"), length)


if __name__ == "__main__":
    main()

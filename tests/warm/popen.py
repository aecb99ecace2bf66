"""Starts `python -m MODULE` as `subprocess` does, in a fork of `tests.warm.server` where that is the same."""

import atexit
import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from protocol.host.prctl import adopting_orphans
from services.settings.automatic import visible_gpus
from services.settings.processes import VISIBLE

ROOT = Path(__file__).resolve().parents[2]
FORKED = ("services.", "torch.distributed.run")
"""How the names of modules begin that are run in a fork."""
STARTERS = ("services.cli", "services.trainer", "torch.distributed.run")
"""Modules that start such processes in turn."""
OWN_VARIABLES = (
    "TETHER_",
    "PYTHONUNBUFFERED",
    "PYTHONSAFEPATH",
    "PYTHONPATH",
    "TORCHELASTIC_",
    "PYTEST_",
    "TOKENIZERS_PARALLELISM",
    "TORCHINDUCTOR_",
    "TRITON_CACHE_AUTOTUNING",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TILELANG_CLEANUP_TEMP_FILES",
)
"""How the names of variables begin that no library reads as it is imported. vLLM and sharded models set the
last four for the process that imports them."""
VARIABLES = dict(os.environ)
"""Variables of this process at its start, before engines and trainers in it set some: a service that a test
starts is to have none of them, and can be forked after them."""
RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "LOCAL_WORLD_SIZE", "WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)  # fmt: skip
"""What torchrun sets for a rank."""
PR_GET_CHILD_SUBREAPER = 37
ROOM = "ROOM_FOR_VARIABLES"
"""A variable of the server, in whose place /proc shows the variables of a fork."""
ROOM_BYTES = 16 << 10
"""Size of that, and of an argument in whose place the command line is."""
READY, THREADS = b"ready", b"threads"
"""Answers of the server when it has imported everything: it forks, or libraries have started threads."""
ANSWER_S = 600.0
"""Limit of the server's imports, and of a fork."""

_exec = subprocess.Popen
"""The class of the standard library."""


@dataclass
class Server:
    """The server of this process, if it has one; its own forks have none unless they start processes."""

    orders: socket.socket | None = None
    process: "subprocess.Popen[bytes] | None" = None
    variables: dict[str, str] | None = None
    """With which the server imported the modules; None: it has not begun."""
    may_start: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)


ours = Server()


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A process that is to be forked. The descriptors of its standard streams come with it."""

    words: list[str]
    """Module and arguments."""
    environ: dict[str, str]
    directory: str
    parent: int
    """Pid of the process that starts it."""
    session: bool
    """Whether it leads a session."""
    umask: int
    tied: bool
    """Whether it gets SIGTERM when its parent ends."""

    @property
    def module(self) -> str:
        return self.words[0]


class WarmPopen(_exec):  # type: ignore[type-arg, valid-type, misc]
    """A process that `subprocess.Popen` would start, and does where a fork would differ."""

    def _execute_child(self, *arguments: Any) -> None:
        (
            args, executable, preexec_fn, close_fds, pass_fds, cwd, env, _, _, shell,
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
            _, gid, gids, uid, umask, start_new_session, process_group,
        ) = arguments  # fmt: skip
        unusual = shell or executable or pass_fds or not close_fds or umask >= 0 or process_group >= 0
        changed = gid is not None or gids is not None or uid is not None
        words = [] if isinstance(args, str | bytes | os.PathLike) else [os.fsdecode(word) for word in args]
        tied = getattr(preexec_fn, "__module__", "") == "protocol.host.prctl"
        other = unusual or changed or (preexec_fn and not tied) or not can_be_forked(words, cwd, env)
        if other or not server_forks():
            super()._execute_child(*arguments)
            return
        order = Order(
            words=[word for word in words[1:] if word != "-u"][1:],
            environ=dict(os.environ if env is None else env),
            directory=str(cwd or os.getcwd()),
            parent=os.getpid(),
            session=start_new_session,
            umask=umask_here(),
            tied=tied,
        )
        self.pid = fork(order, [p2cread, c2pwrite, errwrite])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def umask_here() -> int:
    """Return the mask of this process, which a child inherits."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("\nUmask:")[2].split()[0], 8)


def can_be_forked(words: list[str], cwd: Any, env: Mapping[str, str] | None) -> bool:
    """Return whether a process would be the same in a fork: one of our modules, started where and with the
    variables with which the server imported them."""
    if ours.orders is None and not ours.may_start:
        return False
    words = [word for word in words if word != "-u"]
    if words[:2] != [sys.executable, "-m"] or not words[2].startswith(FORKED):
        return False
    if Path(cwd or os.getcwd()).resolve() != ROOT:
        return False
    before, now = server_variables(), dict(os.environ if env is None else env)
    differing = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
    if now.get(VISIBLE) == "" and not visible_gpus(before):
        differing.discard(VISIBLE)  # there is no GPU to hide
    return all(name.startswith(OWN_VARIABLES) or name in RANK_VARIABLES for name in differing)


def server_forks() -> bool:
    """Start the server unless it runs; return whether it forks."""
    with ours.lock:
        if ours.orders is None:
            start_server()
        return ours.orders is not None


def fork(order: Order, descriptors: list[int]) -> int:
    """Have the server fork; return the pid of what is a child of this process then."""
    with ours.lock:
        server = ours.orders
        assert server is not None
        streams = [standard if given < 0 else given for standard, given in enumerate(descriptors)]
        with adopting_here():
            socket.send_fds(server, [msgspec.msgpack.encode(order)], streams)
            return int(answer_of(server))


@contextmanager
def adopting_here() -> Iterator[None]:
    """Adopt orphans in the block, and after it if this process did before."""
    before = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    with nullcontext() if before.value else adopting_orphans():
        yield


def answer_of(server: socket.socket) -> bytes:
    """Return the next message of the server."""
    answer = server.recv(64)
    if not answer:
        raise ChildProcessError("the server of warm processes has died; its output is above")
    return answer


def server_variables() -> dict[str, str]:
    """Variables with which the server of this process was, or would be, started."""
    own = {name: value for name, value in VARIABLES.items() if not name.startswith("TETHER_")}
    return ours.variables or {**own, "HF_HUB_OFFLINE": "1"}


@contextmanager
def forking(forks: bool = True) -> Iterator[None]:
    """Have asyncio start processes in the block by `WarmPopen`, if `forks`."""
    if forks:
        subprocess.Popen = WarmPopen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = _exec  # type: ignore[misc]


def start_server(variables: dict[str, str] | None = None) -> None:
    """Start the server of this process, with these variables, and wait for its imports.

    Where libraries start threads as they are imported, as some do on hosts with GPUs, there is no server.
    """
    mine, its = socket.socketpair(type=socket.SOCK_SEQPACKET)
    mine.settimeout(ANSWER_S)
    variables = variables or server_variables()
    words = [sys.executable, "-m", "tests.warm.server", str(its.fileno()), "." * ROOM_BYTES]
    ours.process = _exec(words, cwd=ROOT, env={**variables, ROOM: "." * ROOM_BYTES}, pass_fds=[its.fileno()])
    its.close()
    if answer_of(mine) == THREADS:
        ours.may_start = False
        mine.close()
        ours.process.wait()
        return
    use_server(mine, variables)
    atexit.register(end_server)


def end_server() -> None:
    """End the server of this process."""
    if ours.orders is not None and ours.process is not None:
        ours.orders.close()
        ours.process.wait()
        ours.orders = ours.process = ours.variables = None


def use_server(server: socket.socket, variables: dict[str, str]) -> None:
    """Let every process that this one starts be forked by a server, where that is the same."""
    ours.orders, ours.variables = server, variables


def be_server(variables: dict[str, str]) -> None:
    """Let the forks of this process start others with `WarmPopen`, once they have a server."""
    ours.variables, ours.may_start = variables, False
    subprocess.Popen = WarmPopen  # type: ignore[misc]

"""Runs commands inside a sandbox: one, with `serve` a sequence of requests, with `one` a single request.

The file is self-contained, because the project cannot be imported in a sandbox. `process` runs it as code in
the verifiers' sandbox; `bubblewrap` runs it as the ancestor of all commands.

One command: reads {"command", "files", "wall_s", "output", "directory"} as JSON and writes {"said", "ended",
"status", "files"}. `files` is the working directory as a base64 archive, packed and unpacked only in the
sandbox.

`serve`: each request and each reply is a line of JSON with `bytes`, followed by this number of bytes. `one`
handles one such request, as root of a machine that also runs other processes.
"""

import base64
import contextlib
import ctypes
import gzip  # noqa: F401  imported now: the user of commands cannot read it later
import io
import json
import os
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

Answer = tuple[dict[str, Any], bytes]
WORK = "work"
POLL_S = 0.05
MAX_FILES = 1 << 16
"""Maximum files of an in-memory directory (working directory or /tmp), whose size limit counts only contents.
"""
CONNECTIONS = 64
"""Maximum concurrent connections to the endpoint."""


def once() -> None:
    """Unpack the files, run the command, and pack the files again."""
    request = json.load(sys.stdin)
    os.mkdir(WORK)
    if request["files"]:
        unpack(base64.b64decode(request["files"]), WORK)
    said, ended, status = run(request, WORK)
    packed = pack(WORK, request["directory"])
    shutil.rmtree(WORK, ignore_errors=True)  # free memory for the output
    files = None if packed is None else base64.b64encode(packed).decode()
    json.dump({"said": said.decode(errors="replace"), "ended": ended, "status": status, "files": files},
              sys.stdout)  # fmt: skip


def run(
    order: dict[str, Any], work: str, confine: Callable[[], None] | None = None, memory: int = 0
) -> tuple[bytes, str, int]:
    """Return (output, exceeded limit or "", exit status) of a command."""
    try:
        process = subprocess.Popen(
            order["command"], cwd=work, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=confine,
            env={**os.environ, "HOME": os.path.abspath(work), **order.get("variables", {})},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return f"{order['command'][0]}: {error}".encode(), "", 127
    assert process.stdout is not None
    out, output, ended, is_open = process.stdout.fileno(), bytearray(), "", True
    deadline = time.monotonic() + order["wall_s"]
    while not ended:
        is_done = process.poll() is not None
        ready = is_open and bool(select.select([out], [], [], 0 if is_done else POLL_S)[0])
        data = os.read(out, 1 << 16) if ready else b""
        output += data
        is_open = is_open and (bool(data) or not ready)
        if is_done and not data:
            break
        if not is_open:
            time.sleep(POLL_S)
        ended = exceeded(len(output) > order["output"], time.monotonic() > deadline, work, memory)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return bytes(output[: order["output"]]), ended, process.wait()


def exceeded(output: bool, is_late: bool, work: str, memory: int) -> str:
    """Return the exceeded limit, or ""; limits of the whole sandbox are checked only with `memory`."""
    if output or is_late:
        return "output" if output else "time"
    if memory:
        for found in (os.statvfs(work), os.statvfs("/tmp")):
            if found.f_files - found.f_ffree > MAX_FILES:
                return "files"
        if resident() > memory << 20:
            return "memory"
    return ""


def resident() -> int:
    """Return the memory of all processes and System V objects in the sandbox, bytes."""
    pages = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{name}/statm") as file:
                pages += int(file.read().split()[1])
    return pages * resource.getpagesize() + sum(held for _, _, held in system_v())


def system_v() -> Iterator[tuple[str, int, int]]:
    """Yield (kind shm or msg, identifier, bytes) of System V objects, which outlive their processes."""
    for kind, columns in (("shm", ("rss", "swap")), ("msg", ("cbytes",))):
        with contextlib.suppress(OSError), open(f"/proc/sysvipc/{kind}") as file:
            names = file.readline().split()
            for line in file:
                fields = dict(zip(names, line.split(), strict=False))
                yield kind, int(list(fields.values())[1]), sum(int(fields[name]) for name in columns)


def unpack(archive: bytes, work: str) -> None:
    """Unpack an archive; entries that cannot be unpacked are skipped."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as files:
        files.errorlevel = 0
        files.extractall(work)


def pack(work: str, max_bytes: int) -> bytes | None:
    """Return the directory as an archive; None if it has more than `max_bytes` bytes."""
    size = 0
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as files:
        for folder, names, found in os.walk(work):
            for name in (*names, *found):
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):  # the file may vanish meanwhile
                    files.inodes.clear()  # type: ignore[attr-defined]  # a hard link is packed as a copy
                    entry = files.gettarinfo(path, os.path.relpath(path, work))
                    if entry is None or not (entry.isreg() or entry.isdir() or entry.issym()):
                        continue
                    size += entry.size + 512
                    if size > max_bytes:
                        return None
                    if entry.isreg():
                        with open(path, "rb") as file:
                            files.addfile(entry, io.BytesIO(file.read(entry.size).ljust(entry.size, b"\0")))
                    else:
                        files.addfile(entry)
    return buffer.getvalue()


def serve(settings: dict[str, Any]) -> None:
    """Answer requests from standard input until it is closed or the lease ends."""
    if os.getpid() > 2:
        sys.exit("not the first process of a sandbox")  # not PID 1 or 2, whose exit ends all other processes
    ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: commands cannot access this process's descriptors
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))  # PID 1 has no default signal actions
    signal.alarm(max(1, int(settings["lease_s"])))
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    if settings["port"]:
        threading.Thread(target=forward, args=(listener(settings["port"]), settings["socket"]),
                         daemon=True).start()  # fmt: skip
    answer(sink, {"ready": True}, b"")
    for line in source:
        answer_request(json.loads(line), source, sink, settings)


def answer_request(request: dict[str, Any], source: Any, sink: Any, settings: dict[str, Any]) -> None:
    """Execute a request, and send the reply."""
    data = source.read(request["bytes"])
    try:
        answer(sink, *DO[request["do"]](request, data, settings))
    except (OSError, ValueError, tarfile.TarError) as error:
        answer(sink, {"error": str(error)[:300]}, b"")


def answer(sink: Any, fields: dict[str, Any], data: bytes) -> None:
    """Write a reply."""
    sink.write(json.dumps({**fields, "bytes": len(data)}).encode() + b"\n" + data)
    sink.flush()


def do_exec(request: dict[str, Any], data: bytes, settings: dict[str, Any]) -> Answer:
    """Run a command, then kill all processes that it left."""
    confine, is_alone = confinement(settings), os.getpid() <= 2
    said, ended, status = run(request, settings["work"], confine, settings["memory_mb"] if is_alone else 0)
    if is_alone:
        end_all()
    else:
        as_user(settings, end_all)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    if any(system_v()):
        as_user(settings, remove_system_v)
    return {"ended": ended, "status": status}, said


def end_all() -> bytes:
    """Kill all processes that this process may kill, except itself."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        for _ in range(100):  # processes may fork meanwhile
            os.kill(-1, signal.SIGKILL)
    return b""


def remove_system_v() -> bytes:
    """Remove shared memory and message queues, as the commands' user."""
    libc = ctypes.CDLL(None)
    for kind, number, _ in list(system_v()):
        (libc.shmctl if kind == "shm" else libc.msgctl)(number, 0, None)  # IPC_RMID
    return b""


def confinement(settings: dict[str, Any]) -> Callable[[], None]:
    """Return the `preexec_fn` that confines a command's process."""
    uid = settings["uid"]
    mb = 1 << 20
    lines = bytes.fromhex(settings["filter"])
    filters = ctypes.create_string_buffer(lines, len(lines))
    program = ctypes.create_string_buffer(struct.pack("HP", len(lines) // 8, ctypes.addressof(filters)))
    prctl = ctypes.CDLL(None).prctl

    def confine() -> None:
        if uid:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        for kind, value in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_CPU, settings["cpu_s"]),
            (resource.RLIMIT_NOFILE, 1024),
            (resource.RLIMIT_NPROC, settings["processes"] + (0 if uid else 4)),  # bwrap, this, its thread
            (resource.RLIMIT_AS, settings["memory_mb"] * mb),
        ):
            resource.setrlimit(kind, (value, value))
        if len(filters):  # the buffer must live until here
            prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
            prctl(22, 2, ctypes.byref(program))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER

    return confine


def do_write(request: dict[str, Any], data: bytes, settings: dict[str, Any]) -> Answer:
    """Write a file, as the commands' user."""

    def write() -> bytes:
        path = os.path.join(settings["work"], request["path"])
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "wb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o755)) as file:
            file.write(data)
        return b""

    return as_user(settings, write)


def do_read(request: dict[str, Any], data: bytes, settings: dict[str, Any]) -> Answer:
    """Read a file, as the commands' user."""

    def read() -> bytes:
        path = os.path.join(settings["work"], request["path"])
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(f"{request['path']} is not a regular file")
            found = file.read(request["most"] + 1)
        if len(found) > request["most"]:
            raise OSError(f"{request['path']} has more than {request['most']} bytes")
        return b"+" + found

    fields, found = as_user(settings, read)
    if fields.get("missing"):
        return {"found": False}, b""
    return {**fields, "found": True}, found[1:]


def do_pack(request: dict[str, Any], data: bytes, settings: dict[str, Any]) -> Answer:
    """Pack the working directory, as the commands' user."""

    def packed() -> bytes:
        archive = pack(settings["work"], request["most"])
        if archive is None:
            raise OSError(f"the working directory has more than {request['most']} bytes")
        return archive

    return as_user(with_time(settings, request["most"]), packed)


def do_unpack(request: dict[str, Any], data: bytes, settings: dict[str, Any]) -> Answer:
    """Unpack an archive, as the commands' user."""

    def unpacked() -> bytes:
        unpack(data, settings["work"])
        return b""

    return as_user(with_time(settings, request["most"]), unpacked)


def with_time(settings: dict[str, Any], max_bytes: int) -> dict[str, Any]:
    """Return the settings with additional CPU time for packing `max_bytes` bytes."""
    return {**settings, "cpu_s": settings["cpu_s"] + (max_bytes >> 20)}


def as_user(settings: dict[str, Any], work: Callable[[], bytes]) -> Answer:
    """Return the result of `work`, run in a confined child process that cannot harm this one."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            confinement(settings)()
            try:
                result = b"+" + work()
            except FileNotFoundError:
                result = b"?"
            except BaseException as error:
                result = b"-" + (str(error) or type(error).__name__).encode()
            with os.fdopen(write, "wb") as sink:
                sink.write(result)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as source:
        result = source.read()
    os.waitpid(pid, 0)
    if result[:1] == b"?":
        return {"missing": True}, b""
    if result[:1] != b"+":
        return {"error": result[1:301].decode(errors="replace") or "it was killed"}, b""
    return {}, result[1:]


DO = {"exec": do_exec, "write": do_write, "read": do_read, "pack": do_pack, "unpack": do_unpack}
"""Request name -> handler that returns (fields, bytes)."""


def listener(port: int) -> socket.socket:
    """Return a socket that listens on the sandbox's loopback."""
    return socket.create_server(("127.0.0.1", port))


def forward(server: socket.socket, path: str) -> None:
    """Forward connections to `server` to the Unix socket at `path`."""
    others: dict[socket.socket, socket.socket] = {server: server}
    while True:
        for ready in select.select(list(others), [], [])[0]:
            if ready is server:
                near = server.accept()[0]
                if len(others) > 2 * CONNECTIONS:
                    near.close()
                    continue
                far = socket.socket(socket.AF_UNIX)
                try:
                    far.connect(path)
                except OSError:
                    near.close()
                    continue
                others[near], others[far] = far, near
            elif ready in others:
                carry(ready, others)


def carry(ready: socket.socket, others: dict[socket.socket, socket.socket]) -> None:
    """Forward received bytes to the other end; when one end closes, close both."""
    other = others[ready]
    try:
        data = ready.recv(1 << 16)
        if data:
            other.settimeout(30)
            other.sendall(data)
            return
    except OSError:
        pass
    for end in (ready, other):
        others.pop(end, None)
        end.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(json.loads(sys.argv[2]))
    elif sys.argv[1:2] == ["one"]:
        line = sys.stdin.buffer.readline()
        answer_request(json.loads(line), sys.stdin.buffer, sys.stdout.buffer, json.loads(sys.argv[2]))
    else:
        once()

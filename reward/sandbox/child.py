"""Confines itself, then runs code from a model. `reward/sandbox/runner.py` starts this script.

Kinds of runs (`RUNS`): tests in the code's own namespace; calls of its functions; the code as a program.

The script imports only the standard library, not even `protocol.host`. It runs with `python -I`, where the
project cannot be imported, and project code in memory would be accessible to the model's code.

There are three processes: this process; its child, the first process of a new pid namespace, which waits; and
a grandchild, which runs the code. When the first process of a namespace exits, the kernel kills all others in
the namespace. Without namespaces, this process adopts remaining processes as a subreaper and kills them. The
report goes to standard output. Every line begins with a secret word, because the code can also write there.
"""

import builtins
import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 8, 36, 38
MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 1 << 14, 1 << 18, 1 << 1, 1 << 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
CAP_DAC_READ_SEARCH = 2
PR_CAP_AMBIENT, CAP_AMBIENT_RAISE = 47, 2
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_VERSION, LANDLOCK_PATH_BENEATH = 1, 1
READ = (1 << 2) | (1 << 3)
WRITE = {1: 0x1FF2, 2: 0x3FF2, 3: 0x7FF2}
"""Landlock ABI -> all rights that change files: write, remove, make, refer (ABI 2), truncate (ABI 3)."""
ON_FILES = (1 << 1) | (1 << 2) | (1 << 14)
"""Rights that are valid in a rule for a file instead of a directory: write, read, truncate."""
READABLE = (
    sys.prefix,
    sys.base_prefix,
    "/usr",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/dev/urandom",
    "/dev/zero",
)
"""Paths that the code may read, in addition to its working directory."""
REQUIRED = {"pid", "net", "tmpfs", "readonly", "landlock"}
"""Kinds of isolation that must be in force if isolation is required."""
NOBODY = 65534
PR_SET_SECCOMP, SECCOMP_FILTER = 22, 2

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def main() -> None:
    """Confine this process, run the code and the tests, and report."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    spec = json.load(sys.stdin.buffer)
    limits, directory = spec["limits"], spec["directory"]
    limits["processes"] += spec["kind"] == "programs"  # for this process, which only starts the programs
    if os.getuid() == 0:
        os.chown(directory, NOBODY, NOBODY)
    isolation = namespaces(directory, limits["file_mb"])
    report = reporter(spec["nonce"])
    if "pid" not in isolation:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)

    def run_confined() -> None:
        confine(limits, directory, isolation, [bytes.fromhex(text) for text in spec["filters"]])
        if limits["isolation"] == "required" and REQUIRED - isolation:
            offered = ", ".join(sorted(isolation)) or "nothing"
            raise OSError(f"reward isolation is required, but this machine offers only: {offered}")
        report("isolation " + " ".join(sorted(isolation)))
        RUNS[spec["kind"]](spec["code"], spec["cases"], report)

    wait_for(fork(lambda: wait_for(fork(run_confined)) if "pid" in isolation else run_confined()))
    kill_orphans()
    report("done")


def fork(work: Callable[[], Any]) -> int:
    """Run `work` in a child and return its pid. The child is killed when this process exits."""
    pid = os.fork()
    if pid:
        return pid
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        work()
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    os._exit(0)


def wait_for(pid: int) -> None:
    """Wait for a child; reap orphans meanwhile, as the first process of a pid namespace must."""
    while os.waitpid(-1, 0)[0] != pid:
        pass


def kill_orphans() -> None:
    """Kill processes that outlived the code. With a pid namespace, none remain."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as children:
            pids = [int(pid) for pid in children.read().split()]
        if not pids:
            return
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def reporter(nonce: str) -> Callable[[str], None]:
    """Return a function that writes lines to standard output, even after the code changes descriptor 1."""
    out = os.dup(1)

    def report(text: str) -> None:
        line = f"{nonce} {text}\n".encode()
        while line:
            line = line[os.write(out, line) :]

    return report


def namespaces(directory: str, size_mb: int) -> set[str]:
    """Enter the namespaces that the kernel allows; return the isolation in force."""
    uid, gid = os.geteuid(), os.getegid()
    user = NEWUSER if uid else 0
    if libc.unshare(user | NEWPID | NEWNET | NEWIPC | NEWNS):
        return set()
    if user:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    entered = {"pid", "net"}
    owner = f",uid={NOBODY},gid={NOBODY}" if not user else ""
    options = f"size={size_mb}m,nr_inodes=4096,mode=700{owner}".encode()
    if libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None):
        return entered
    read_only = struct.pack("=4Q", MOUNT_ATTR_RDONLY, 0, 0, 0)
    if libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, read_only, len(read_only)) == 0:
        entered.add("readonly")
    if libc.mount(b"tmpfs", directory.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options) == 0:
        entered.add("tmpfs")
    return entered


def confine(limits: dict[str, Any], directory: str, isolation: set[str], filters: list[bytes]) -> None:
    """Drop all privileges that the code does not need, and add the isolation in force to `isolation`.

    The second of the seccomp `filters` also allows changing modes and times. This is safe only if all mounts
    except the working directory are read-only, and Landlock blocks the mounts of other processes.
    """
    os.chdir(directory)
    target = NOBODY if os.getuid() == 0 else os.getuid()
    own = target == os.getuid()  # then the count includes this process
    processes = tasks_of(target, within=own and "pid" in isolation) - own + limits["processes"]
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if landlock(directory):
        isolation.add("landlock")
    if target == NOBODY:
        libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        isolation.add("nobody")
    keep_capabilities(None if readable() or "landlock" not in isolation else CAP_DAC_READ_SEARCH)
    if not readable():
        raise OSError(
            f"Python in {sys.base_prefix} is not readable for the user nobody; "
            "run reward workers as another user than root"
        )
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # setuid cleared it
    mb = 1 << 20
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_FSIZE, limits["file_mb"] * mb),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_AS, limits["memory_mb"] * mb),
    ):
        resource.setrlimit(kind, (value, value))
    if seccomp(filters[{"readonly", "tmpfs", "landlock"} <= isolation]):
        isolation.add("seccomp")


def readable() -> bool:
    """Return whether this process may read the standard library, from which the code imports."""
    try:
        with open(os.__file__):
            return True
    except OSError:
        return False


def landlock(directory: str) -> bool:
    """Restrict writing to `directory`, and reading to `directory` and `READABLE`; False without Landlock."""
    abi = libc.syscall(LANDLOCK_CREATE, None, 0, LANDLOCK_VERSION)
    if abi < 1:
        return False
    write = WRITE[min(abi, max(WRITE))]
    attribute = ctypes.c_uint64(READ | write)
    rules = libc.syscall(LANDLOCK_CREATE, ctypes.byref(attribute), ctypes.sizeof(attribute), 0)
    if rules < 0:
        return False
    for path, rights in (
        *((path, READ) for path in READABLE),
        (directory, READ | write),
        ("/dev/null", READ | write),
    ):
        with contextlib.suppress(FileNotFoundError):
            allow(rules, path, rights)
    done: bool = libc.syscall(LANDLOCK_RESTRICT, rules, 0) == 0
    os.close(rules)
    return done


def allow(rules: int, path: str, rights: int) -> None:
    """Add a rule to a Landlock ruleset."""
    beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", rights if os.path.isdir(path) else rights & ON_FILES, beneath)
    if libc.syscall(LANDLOCK_ADD, rules, LANDLOCK_PATH_BENEATH, rule, 0):
        raise OSError(ctypes.get_errno(), "landlock_add_rule", path)
    os.close(beneath)


def seccomp(lines: bytes) -> bool:
    """Load a seccomp filter, an array of struct sock_filter; False if unsupported or empty."""
    code = ctypes.create_string_buffer(lines, len(lines))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(lines) // 8, ctypes.addressof(code)))
    return bool(lines) and libc.prctl(PR_SET_SECCOMP, SECCOMP_FILTER, head, 0, 0) == 0


def keep_capabilities(number: int | None) -> None:
    """Drop all capabilities except `number`, if given, which started programs inherit."""
    mask = 0 if number is None else 1 << number
    header = struct.pack("=Ii", 0x20080522, 0)
    if libc.capset(header, struct.pack("=6I", mask, mask, mask, 0, 0, 0)):
        raise OSError(ctypes.get_errno(), "capset")
    if number is not None and libc.prctl(PR_CAP_AMBIENT, CAP_AMBIENT_RAISE, number, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl PR_CAP_AMBIENT")


def tasks_of(uid: int, within: bool) -> int:
    """Return the number of threads counted for RLIMIT_NPROC: all of the user's on this machine.

    With `within`, in a user namespace of our own, kernels from 5.14 on count only threads in the namespace.
    """
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    within = within and release is not None and (int(release[1]), int(release[2])) >= (5, 14)
    ours, count = os.readlink("/proc/self/ns/user"), 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == uid and not (
                within and os.readlink(f"/proc/{pid}/ns/user") != ours
            ):
                count += len(os.listdir(f"/proc/{pid}/task"))
    return count


def run_tests(code: str, tests: list[str], report: Callable[[str], None]) -> None:
    """Run the code, then each test; report the tests that do not raise.

    The tests are compiled before the code runs, and use the original builtins and `exec`. All other changes
    by the code to the interpreter affect the tests.
    """
    compiled = [compiled_or_none(test, f"test_{i}.py") for i, test in enumerate(tests)]
    namespace = run_code(code)
    if namespace is None:
        return
    for i, test in enumerate(compiled):
        if test is None:
            continue
        try:
            exec(test, namespace)
        except BaseException:
            continue
        report(str(i))


def run_calls(code: str, calls: list[Any], report: Callable[[str], None]) -> None:
    """Run the code, then call its functions; report the return values as JSON."""
    dumps = json.dumps
    namespace = run_code(code)
    if namespace is None:
        return
    for i, (function, positional, keywords) in enumerate(calls):
        try:
            result = eval(function, namespace)(*positional, **keywords)
            report(f"{i} {dumps(result)}")
        except BaseException:
            continue


def run_programs(code: str, inputs: list[str], report: Callable[[str], None]) -> None:
    """Run the code as a program for each input; report the output as JSON if the exit code is 0.

    No code of the model runs in this process.
    """
    max_output = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    for i, given in enumerate(inputs):
        try:
            with open("response.py", "w", encoding="utf-8", errors="surrogatepass") as file:
                file.write(code)
            with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as output:
                source.write(given.encode(errors="surrogatepass"))
                source.seek(0)
                ended = subprocess.run(
                    [sys.executable, "-I", "response.py"],
                    stdin=source,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                )
                output.seek(0)
                printed = output.read(max_output).decode(errors="replace")
        except (OSError, MemoryError, ValueError):  # for example, an earlier run filled the disk
            continue
        if ended.returncode == 0:
            report(f"{i} {json.dumps(printed)}")


def run_code(code: str) -> dict[str, Any] | None:
    """Run the code and return its namespace with the original builtins; None if the code raised."""
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    table = vars(builtins)
    before = dict(table)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(code, "response.py", "exec"), namespace)
    except BaseException:
        namespace = {}
    table.clear()
    table.update(before)
    if not namespace:
        return None
    namespace["__builtins__"] = before
    return namespace


def compiled_or_none(test: str, name: str) -> Any:
    """Return a test as a code object; None if the test does not compile."""
    try:
        return compile(test, name, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


RUNS: dict[str, Callable[[str, Any, Callable[[str], None]], None]] = {
    "tests": run_tests,
    "calls": run_calls,
    "programs": run_programs,
}
"""Kind of cases -> function that runs them."""


if __name__ == "__main__":
    main()

"""Runs code that a model wrote, together with tests, in a process of its own with limits.

Always: own session, closed environment, temporary working directory, limits on CPU time, memory, file size,
open files and processes, no core dumps, ended with everything that it started. Where the kernel allows it
(`IsolationLevel`), also: no network, no sight of other processes, a memory file system of limited size as
working directory, files outside it read-only and mostly unreadable (Landlock), no system calls that code has
no use for (seccomp, x86-64); as root, the code runs as `nobody`. `reward/sandbox/child.py` does this inside
the new process.

What it does not do: the tests run in the same interpreter as the code, so code that is written to fool this
very sandbox can; and this is not a virtual machine. Run reward workers of untrusted models in a container or
virtual machine of their own.
"""

import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from protocol.errors import RewardError
from protocol.host.process_tree import kill_process_tree

CHILD = Path(__file__).with_name("child.py")
SETUP_S = 60.0
"""For the process to start and confine itself; only then does the code's own time run."""
MAX_REPORT = 1 << 16
"""Bytes read from the process; more than any honest report."""


KINDS = frozenset({"pid", "net", "tmpfs", "landlock", "seccomp", "nobody"})
"""Of isolation; the last one only as root."""
NEEDED = KINDS - {"nobody"}
"""What full isolation consists of."""


class IsolationLevel(StrEnum):
    """What happens where the kernel does not offer all kinds of isolation."""

    BEST = "best"  # use what there is
    REQUIRED = "required"  # refuse to run code


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on one run."""

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_mb: int = 512
    """Address space of each process, MiB."""
    file_mb: int = 16
    """Size of one file, and of the working directory where it is a memory file system, MiB."""
    processes: int = 8
    """Processes and threads that the code may have."""
    isolation: IsolationLevel = IsolationLevel.BEST

    def __post_init__(self) -> None:
        for name in ("wall_s", "cpu_s", "memory_mb", "file_mb", "processes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"limits: {name} is {getattr(self, name)}, must be above 0")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a run."""

    passed: frozenset[int]
    """Indices of the tests that did not raise."""
    timed_out: bool
    isolation: frozenset[str]
    """What was in force, of `KINDS`."""


def run_tests(code: str, tests: list[str], limits: Limits) -> Verdict:
    """Run `code`, then each test in its namespace. Leaves no process and no file behind.

    Raises:
        RewardError: if the sandbox cannot be set up. What the code does never raises.
    """
    nonce = secrets.token_hex(16)
    directory = tempfile.mkdtemp(prefix="tether-sandbox-")
    spec = {"code": code, "tests": tests, "nonce": nonce, "directory": directory, "limits": asdict(limits)}
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", str(CHILD)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/", start_new_session=True,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": directory, "TMPDIR": directory, "PYTHONHASHSEED": "0"},
        )  # fmt: skip
        with process:
            try:
                report, timed_out = _watch(process, json.dumps(spec).encode(), nonce, limits.wall_s)
            finally:
                kill_process_tree(process.pid)
            assert process.stderr is not None
            parsed = parse_report(report, nonce, len(tests))
            if parsed is None:
                said = process.stderr.read(2000).decode(errors="replace").strip()
                raise RewardError(f"the sandbox cannot be set up: {said[-400:] or 'it said nothing'}")
            return Verdict(parsed[0], timed_out, parsed[1])
    finally:
        shutil.rmtree(directory, onerror=_open_and_retry)


def _watch(process: "subprocess.Popen[bytes]", spec: bytes, nonce: str, wall_s: float) -> tuple[bytes, bool]:
    """Read the report until it is complete, too long, ended, or late."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(spec)
        process.stdin.close()
    except BrokenPipeError:
        pass  # it failed to start; stderr says why
    deadline, running = time.monotonic() + SETUP_S, False
    report, begun, done = b"", f"{nonce} isolation".encode(), f"{nonce} done\n".encode()
    while len(report) < MAX_REPORT and done not in report:
        if not running and begun in report:
            deadline, running = time.monotonic() + wall_s, True
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return report, True
        data = os.read(process.stdout.fileno(), 4096)
        if not data:
            break
        report += data
    return report, False


def parse_report(report: bytes, nonce: str, tests: int) -> tuple[frozenset[int], frozenset[str]] | None:
    """Tests passed, of so many, and what isolation was in force; None if the process did not get as far as to
    run the code."""
    lines = [line.partition(" ") for line in report.decode(errors="replace").split("\n")]
    trusted = [rest for first, _, rest in lines if first == nonce]
    if not trusted or not trusted[0].startswith("isolation"):
        return None
    known = {str(i): i for i in range(tests)}
    return frozenset(known[rest] for rest in trusted if rest in known), KINDS.intersection(
        trusted[0].split()[1:]
    )


def _open_and_retry(function: object, path: str, _: object) -> None:
    """The code may have taken our rights on its directories away."""
    os.chmod(os.path.dirname(path), 0o700)
    os.chmod(path, 0o700)
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        os.unlink(path)

"""Runs code of a model in a process of its own with limits: with tests, with calls, or as a program.

`run_tests` runs tests in the interpreter of the code. `run_calls` and `run_programs` return plain values
(JSON) that code of ours compares outside; expected results never enter the sandbox.

Always: a session of its own, a minimal environment, a temporary working directory, limits on CPU time,
memory, file size, open files and processes, no core dumps; it is killed together with everything that it
started. If the kernel allows it (`IsolationLevel`), also: no network, no visibility of other processes, a
memory file system of limited size as working directory, all other mounts read-only, files outside it
read-only and mostly unreadable (Landlock), the system calls of a list only (seccomp, x86-64); as root, the
code runs as `nobody`. `reward/sandbox/child.py` does this inside the new process.

Limits of the sandbox: the tests of `run_tests` run in the same interpreter as the code, so code written
against this very sandbox can fake their results; and it is not a virtual machine. Run reward workers of
untrusted models in a container or virtual machine of their own.
"""

import contextlib
import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval

from protocol.errors import RewardError
from reward.sandbox.process_tree import kill_process_tree
from reward.sandbox.system_calls import seccomp_filter

CHILD = Path(__file__).with_name("child.py")
SETUP_S = 60.0
"""Time limit for the process to start and confine itself; the code's own time begins after that."""
MAX_REPORT = 1 << 16
"""Bytes read from the process besides outputs, more than any honest report has."""
KINDS = frozenset({"pid", "net", "tmpfs", "readonly", "landlock", "seccomp", "nobody"})
"""Kinds of isolation; `nobody` only as root."""
NEEDED = KINDS - {"nobody"}
"""Kinds that make up full isolation."""


class IsolationLevel(StrEnum):
    """Choice for kernels without all kinds of isolation."""

    BEST = "best"  # use those that it offers
    REQUIRED = "required"  # refuse to run code


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run."""

    wall_s: Annotated[float, Interval(gt=0)] = 10.0
    """Wall-clock seconds of code and tests together."""
    cpu_s: Annotated[int, Interval(gt=0)] = 5
    """CPU seconds of each process."""
    memory_mb: Annotated[int, Interval(gt=0)] = 512
    """Address space of each process, MiB."""
    file_mb: Annotated[int, Interval(gt=0)] = 16
    """Size of each file, and of the working directory if it is a memory file system, MiB."""
    output_kb: Annotated[int, Interval(gt=0)] = 1024
    """What all calls return, or all programs print, as JSON text, KiB. What exceeds it has no output."""
    processes: Annotated[int, Interval(gt=0)] = 8
    """Processes and threads of the code."""
    isolation: IsolationLevel = IsolationLevel.BEST
    """Choice for kernels without all kinds of isolation."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a run."""

    passed: frozenset[int]
    """Numbers of the tests that did not raise, calls that returned, or programs that exited with 0."""
    outputs: Mapping[int, str]
    """Number of a call or program -> what it returned or printed, as JSON text; the code may have forged it.
    """
    timed_out: bool
    """Whether `wall_s` was exceeded."""
    isolation: frozenset[str]
    """The `KINDS` that were in force."""


def run_tests(code: str, tests: Sequence[str], limits: Limits) -> Verdict:
    """Run `code`, then each test, compiled before, in its namespace; leaves no process and no file behind.

    Raises:
        RewardError: the sandbox cannot be set up. The code itself cannot cause an exception.
    """
    return _run("tests", code, tests, limits)


def run_calls(
    code: str, calls: Sequence[tuple[str, Sequence[Any], Mapping[str, Any]]], limits: Limits
) -> Verdict:
    """Run `code`, then call functions of it with arguments, and return their results as JSON.

    Args:
        code: defines the functions.
        calls: expression that names a function, positional and keyword arguments (JSON types).
        limits: of all calls together.

    Raises:
        RewardError: the sandbox cannot be set up.
    """
    return _run("calls", code, calls, limits)


def run_programs(code: str, inputs: Sequence[str], limits: Limits, stop: int | None = None) -> Verdict:
    """Run `code` as a program of its own for each input, and return what it prints.

    Args:
        code: the program.
        inputs: what it reads from standard input.
        limits: of all runs together.
        stop: a file descriptor; when it can be read, the code is killed as if its time were over.

    Raises:
        RewardError: the sandbox cannot be set up, or was stopped before the code began.
    """
    return _run("programs", code, inputs, limits, stop)


def _run(kind: str, code: str, cases: Sequence[Any], limits: Limits, stop: int | None = None) -> Verdict:
    nonce = secrets.token_hex(16)
    directory = tempfile.mkdtemp(prefix="tether-sandbox-")
    spec = {
        "kind": kind,
        "code": code,
        "cases": cases,
        "nonce": nonce,
        "directory": directory,
        "limits": asdict(limits),
        "filters": [seccomp_filter(own_files=own).hex() for own in (False, True)],
    }
    most = MAX_REPORT + (0 if kind == "tests" else limits.output_kb << 10)
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
            env={
                "PATH": "/usr/bin:/bin",
                "LANG": "C.UTF-8",
                "HOME": directory,
                "TMPDIR": directory,
                "PYTHONHASHSEED": "0",
                "GIT_CONFIG_NOSYSTEM": "1",  # /etc/gitconfig cannot be read, upon which git ends
            },
        )
        with process:
            try:
                report, timed_out = _watch(
                    process, json.dumps(spec).encode(), nonce, limits.wall_s, most, stop
                )
            finally:
                kill_process_tree(process.pid)
            assert process.stderr is not None
            parsed = parse_report(report, nonce, len(cases))
            if parsed is None:
                output = process.stderr.read(2000).decode(errors="replace").strip()
                raise RewardError(f"the sandbox cannot be set up: {output[-400:] or 'no error output'}")
            outputs, isolation = parsed
            return Verdict(frozenset(outputs), outputs, timed_out, isolation)
    finally:
        _remove(directory)


def _watch(
    process: "subprocess.Popen[bytes]",
    spec: bytes,
    nonce: str,
    wall_s: float,
    most: int,
    stop: int | None = None,
) -> tuple[bytes, bool]:
    """Return the report, and whether time ran out before it was complete."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(spec)
        process.stdin.close()
    except BrokenPipeError:
        pass  # it failed to start; stderr says why
    deadline, running = time.monotonic() + SETUP_S, False
    report, begun, done = b"", f"{nonce} isolation".encode(), f"{nonce} done\n".encode()
    watched = select.poll()  # `select.select` takes no descriptor over 1023, and a worker may have thousands
    for descriptor in (process.stdout.fileno(), *([] if stop is None else [stop])):
        watched.register(descriptor, select.POLLIN)
    while len(report) < most and not report.endswith(done):
        if not running and begun in report:
            deadline, running = time.monotonic() + wall_s, True
        ready = watched.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready or stop in dict(ready):
            return report, True
        data = os.read(process.stdout.fileno(), 1 << 16)
        if not data:
            break
        report += data
    return report, False


def parse_report(report: bytes, nonce: str, cases: int) -> tuple[dict[int, str], frozenset[str]] | None:
    """Return the cases that passed, with their outputs, and the isolation in force; None if no code was run.

    Args:
        report: output of the process.
        nonce: the secret word that begins every line of ours.
        cases: number of tests, calls or programs.
    """
    lines = [line.partition(" ") for line in report.decode(errors="replace").split("\n")]
    trusted = [rest for first, _, rest in lines if first == nonce]
    if not trusted or not trusted[0].startswith("isolation"):
        return None
    known = {str(i): i for i in range(cases)}
    outputs = {}
    for line in trusted:
        case, _, output = line.partition(" ")
        if case in known:
            outputs[known[case]] = output
    return outputs, KINDS.intersection(trusted[0].split()[1:])


def _remove(directory: str) -> None:
    """Remove a directory in which the code may have closed folders, and left links to anywhere."""
    _open(directory)
    for _, folders, _, opened in os.fwalk(directory):
        for folder in folders:
            _open(folder, opened)
    shutil.rmtree(directory, ignore_errors=True)  # what still runs without a pid namespace may add files


def _open(folder: str, parent: int | None = None) -> None:
    """Give this user all rights to a folder; links are not followed."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{descriptor}", 0o700)
        finally:
            os.close(descriptor)

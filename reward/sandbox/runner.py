"""Runs code from a model in a separate process with limits: with tests, with calls, or as a program.

`run_tests` runs tests in the interpreter of the code. `run_calls` and `run_programs` return plain values
(JSON), which trusted code compares outside; expected results never enter the sandbox.

Always in force: a new session; a minimal environment; a temporary working directory; limits on CPU time,
memory, file size, open files and processes; no core dumps. The process is killed with all of its descendants.
If the kernel allows it (`IsolationLevel`), also: no network; no visibility of other processes; a size-limited
memory file system as working directory; all other mounts read-only; files outside read-only and mostly
unreadable (Landlock); an allow-list of system calls (seccomp, x86-64); as root, the code runs as `nobody`.
`reward/sandbox/child.py` applies this inside the new process.

Weaknesses: the tests of `run_tests` run in the code's interpreter, so code written against this sandbox can
fake their results. The sandbox is not a virtual machine. Run reward workers of untrusted models in their own
container or virtual machine.
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
"""Time limit for the process to start and confine itself. The code's time limit starts afterwards."""
MAX_REPORT = 1 << 16
"""Maximum size of the report without outputs, bytes; larger than any honest report."""
KINDS = frozenset({"pid", "net", "tmpfs", "readonly", "landlock", "seccomp", "nobody"})
"""Kinds of isolation; `nobody` applies only as root."""
NEEDED = KINDS - {"nobody"}
"""Kinds of isolation that together are full isolation."""


class IsolationLevel(StrEnum):
    """Behaviour on kernels that lack kinds of isolation."""

    BEST = "best"  # use the available kinds
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
    """Total size of the return values of all calls, or the output of all programs, as JSON text, KiB. Outputs
    beyond the limit are lost."""
    processes: Annotated[int, Interval(gt=0)] = 8
    """Number of processes and threads of the code."""
    isolation: IsolationLevel = IsolationLevel.BEST
    """Behaviour on kernels that lack kinds of isolation."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a run."""

    passed: frozenset[int]
    """Indices of the tests that did not raise, calls that returned, or programs that exited with 0."""
    outputs: Mapping[int, str]
    """Index of a call or program -> its return value or output, as JSON text; the code may have forged the
    text."""
    timed_out: bool
    """Whether `wall_s` was exceeded."""
    isolation: frozenset[str]
    """`KINDS` in force during the run."""


def run_tests(code: str, tests: Sequence[str], limits: Limits) -> Verdict:
    """Run `code`, then each precompiled test in its namespace; leave no processes or files behind.

    Raises:
        RewardError: the sandbox cannot be set up. The code itself cannot cause an exception.
    """
    return _run("tests", code, tests, limits)


def run_calls(
    code: str, calls: Sequence[tuple[str, Sequence[Any], Mapping[str, Any]]], limits: Limits
) -> Verdict:
    """Run `code`, then call its functions with arguments, and return their results as JSON.

    Args:
        code: code that defines the functions.
        calls: expression of a function, positional and keyword arguments (JSON types).
        limits: limits of all calls together.

    Raises:
        RewardError: the sandbox cannot be set up.
    """
    return _run("calls", code, calls, limits)


def run_programs(code: str, inputs: Sequence[str], limits: Limits, stop: int | None = None) -> Verdict:
    """Run `code` as a separate program for each input, and return the outputs.

    Args:
        code: source of the program.
        inputs: standard input of each run.
        limits: limits of all runs together.
        stop: file descriptor; once readable, the code is killed as after a timeout.

    Raises:
        RewardError: the sandbox cannot be set up, or was stopped before the code started.
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
    max_bytes = MAX_REPORT + (0 if kind == "tests" else limits.output_kb << 10)
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
                "GIT_CONFIG_NOSYSTEM": "1",  # git fails if it cannot read /etc/gitconfig
            },
        )
        with process:
            try:
                report, timed_out = _watch(
                    process, json.dumps(spec).encode(), nonce, limits.wall_s, max_bytes, stop
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
    max_bytes: int,
    stop: int | None = None,
) -> tuple[bytes, bool]:
    """Return the report, and whether the time limit expired before the report was complete."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(spec)
        process.stdin.close()
    except BrokenPipeError:
        pass  # the process failed to start; stderr has the reason
    deadline, running = time.monotonic() + SETUP_S, False
    report, begun, done = b"", f"{nonce} isolation".encode(), f"{nonce} done\n".encode()
    watched = select.poll()  # `select.select` supports no descriptors over 1023; a worker may have thousands
    for descriptor in (process.stdout.fileno(), *([] if stop is None else [stop])):
        watched.register(descriptor, select.POLLIN)
    while len(report) < max_bytes and not report.endswith(done):
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
    """Return the outputs of the passed cases, and the isolation in force; None if no code ran.

    Args:
        report: output of the process.
        nonce: secret word at the beginning of every trusted line.
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
    """Remove a directory in which the code may have restricted folders and created links."""
    _open(directory)
    for _, folders, _, opened in os.fwalk(directory):
        for folder in folders:
            _open(folder, opened)
    shutil.rmtree(directory, ignore_errors=True)  # without a pid namespace, running processes may add files


def _open(folder: str, parent: int | None = None) -> None:
    """Grant this user all rights to a folder, without following links."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{descriptor}", 0o700)
        finally:
            os.close(descriptor)

"""Starts a process of `tether up` in its own session, which ends with `tether up`."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO

from protocol.host.prctl import tied_to_this_process
from services.runtime.import_path import safe_environment


class ForkedProcess:
    """Child process forked by another process; has the interface of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        """Wait for the child `pid` in a thread that ends with the child."""
        self.pid = pid
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        threading.Thread(target=self._watch, name=f"waitpid-{pid}", daemon=True).start()

    @property
    def returncode(self) -> int | None:
        """Exit code, negative after a signal; None while the process runs."""
        return self._code.result() if self._code.done() else None

    async def wait(self) -> int:
        """Wait for the end of the process; return its exit code."""
        return await asyncio.shield(self._code)

    def send_signal(self, signum: int) -> None:
        """Send a signal unless the process has ended."""
        if self.returncode is None:
            os.kill(self.pid, signum)

    def _watch(self) -> None:
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # the child was never adopted, or other code has waited for it
            code = 255
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._code.get_loop().call_soon_threadsafe(self._code.set_result, code)


ServiceProcess = asyncio.subprocess.Process | ForkedProcess


async def start_session(
    words: Sequence[str],
    environ: Mapping[str, str],
    name: str,
    output: IO[bytes],
    stdin: int,
    withheld: frozenset[str] = frozenset(),
) -> asyncio.subprocess.Process:
    """Start `python -m WORDS`, which gets SIGTERM when this process dies.

    Args:
        words: module and arguments.
        environ: variables that override inherited ones.
        name: `TETHER_INSTANCE` of the process.
        output: file for standard output and standard error.
        stdin: descriptor of standard input, or `asyncio.subprocess.DEVNULL`.
        withheld: names of variables that the process must not inherit.
    """
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *words,
        env={
            **safe_environment(inherited_environment(withheld)),
            **environ,
            "TETHER_INSTANCE": name,
            "PYTHONUNBUFFERED": "1",
        },
        stdin=stdin,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=tied_to_this_process(),
    )


def kill_session(process: ServiceProcess) -> None:
    """Send SIGKILL to every remaining process in the session of a process started here."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def inherited_environment(withheld: frozenset[str]) -> dict[str, str]:
    """Return the environment without `withheld` variables and settings; services read settings.json."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in withheld and (not name.startswith("TETHER_") or name == "TETHER_LOG_LEVEL")
    }

"""Starts a process of `tether up` in a session of its own, which ends with `tether up`."""

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
    """A child of this process that another one has forked; it is used as `asyncio.subprocess.Process` is."""

    def __init__(self, pid: int) -> None:
        """Watch for the end of the child `pid`, in a thread that ends with it."""
        self.pid = pid
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        threading.Thread(target=self._watch, name=f"waitpid-{pid}", daemon=True).start()

    @property
    def returncode(self) -> int | None:
        """Exit code once it has ended, negative if a signal ended it."""
        return self._code.result() if self._code.done() else None

    async def wait(self) -> int:
        """Return the exit code once it has ended."""
        return await asyncio.shield(self._code)

    def send_signal(self, signum: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, signum)

    def _watch(self) -> None:
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # it was never adopted, or other code has waited for it
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
    """Start `python -m WORDS`; it gets SIGTERM when this process dies.

    Args:
        words: module and arguments.
        environ: variables over the inherited ones.
        name: `TETHER_INSTANCE` of the process.
        output: file of its standard output and errors.
        stdin: descriptor of its standard input, or `asyncio.subprocess.DEVNULL`.
        withheld: names of variables that it must not inherit.
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
    """Send SIGKILL to every process that is left in the session of a process that was started here."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def inherited_environment(withheld: frozenset[str]) -> dict[str, str]:
    """Return the environment without these variables and without settings: services read settings.json."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in withheld and (not name.startswith("TETHER_") or name == "TETHER_LOG_LEVEL")
    }

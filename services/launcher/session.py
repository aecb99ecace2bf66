"""Starts a process of `tether up` in a session of its own, which ends with `tether up`."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from protocol.host.parent_death import tied_to_this_process
from services.runtime.import_path import safe_environment


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


def kill_session(process: asyncio.subprocess.Process) -> None:
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

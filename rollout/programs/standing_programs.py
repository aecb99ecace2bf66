"""Runs persistent programs that serve one sample after another over standard input and output.

Each input line is a task as JSON, with the session's `url` and `key`. The program replies with a line {"key":
..., "reward": NUMBER or null}, or {"key": ..., "error": TEXT}, which counts as a failure without a reward.
"""

import asyncio
import json
import logging
from contextlib import suppress
from typing import Any

from rollout.programs.outcome import Outcome, outcome_of
from rollout.programs.program import MAX_LINE, Launch, Program

log = logging.getLogger("tether.programs")

END_S = 1.0
"""Seconds for a program to exit after it has closed its output."""


class StandingPrograms:
    """Persistent programs with one command, started on demand and restarted after they end."""

    def __init__(self, launch: Launch, max_programs: int) -> None:
        """Args: launch: start settings; max_programs: maximum concurrent programs, one sample each."""
        self._launch = launch
        self._free = asyncio.Semaphore(max_programs)
        self._idle: list[Program] = []

    async def outcome(self, task: dict[str, Any]) -> Outcome:
        """Run a task in a program, and return its outcome; wait while all programs are busy.

        Cancelling the call kills the program that runs the task.

        Raises:
            SettingsError: the program cannot be started.
            ProgramKilled: a signal ended the program.
            RuntimeError: the program ended, or reported a failure.
            ValueError: the reply is not an outcome of this task.
        """
        async with self._free:
            program = await self._started()
            try:
                fields = await _answered(program, task)
                outcome = None if "error" in fields else outcome_of(fields)
            except BaseException:
                await program.close()  # its state is unknown
                raise
            self._idle.append(program)
        if "error" in fields:
            raise RuntimeError(f"the program says: {fields['error']}")
        return outcome

    async def close(self) -> None:
        """End idle programs; busy programs end with their calls."""
        while self._idle:
            await self._idle.pop().close()

    async def _started(self) -> Program:
        while self._idle:
            program = self._idle.pop()
            status = program.process.returncode
            if status is None:
                return program
            log.warning("program.ended status=%d said=%s", status, program.last_output())
            await program.close()
        program = Program(self._launch)
        try:
            await program.start({}, lines=True)
        except BaseException:
            await program.close()
            raise
        return program


async def _answered(program: Program, task: dict[str, Any]) -> dict[str, Any]:
    """Return the line with which a program answers a task."""
    program.forget()
    try:
        program.sink.write(json.dumps(task).encode() + b"\n")
        await program.sink.drain()
        line = await program.source.readline()
    except ConnectionError:
        line = b""
    except ValueError:
        raise ValueError(f"a line of the program is over {MAX_LINE} bytes") from None
    if not line.endswith(b"\n"):
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await program.ended()
                raise RuntimeError(f"the program ended without an outcome: {program.last_output()}")
        raise RuntimeError(f"the program closed its output before it ended: {program.last_output()}")
    try:
        fields = json.loads(line)
        key = fields["key"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"a line of the program is not an outcome: {line[:200]!r}") from None
    if key != task["key"]:
        raise ValueError("the program answered a task that it does not have: one line for each")
    return dict(fields)

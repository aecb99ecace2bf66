"""Standing programs: one line for each task, and a new process for one that is not where it should be."""

import asyncio
import logging
import signal
from typing import Any

import pytest

from protocol.errors import SettingsError
from rollout.programs.program import Launch, ProgramKilled
from rollout.programs.standing_programs import StandingPrograms

LOOP = """
import json, os, sys

def say(**outcome):
    print(json.dumps({"key": task["key"], **outcome}), flush=True)

for line in sys.stdin:
    task = json.loads(line)
    exec(task.get("do", "say(reward=os.getpid())"))
"""
"""Does what a task says; as a rule the reward is the process id."""


def standing(most: int = 1) -> StandingPrograms:
    return StandingPrograms(Launch(("python", "-c", LOOP)), most)


def task(number: int, do: str = "") -> dict[str, Any]:
    return {"key": f"key {number}", **({"do": do} if do else {})}


async def test_tasks_share_the_processes_that_there_are() -> None:
    programs = standing(2)
    try:
        async with asyncio.TaskGroup() as tasks:
            given = [tasks.create_task(programs.outcome(task(i))) for i in range(9)]
        assert 1 <= len({done.result() for done in given}) <= 2
    finally:
        await programs.close()


@pytest.mark.parametrize(
    ("do", "error", "why", "stays"),
    [
        ("say(error='no idea')", RuntimeError, "the program says: no idea", True),
        ("print('no idea', file=sys.stderr); sys.exit(3)", RuntimeError, "status 3: no idea", False),
        ("sys.exit()", RuntimeError, "ended without an outcome", False),
        ("os.close(1); import time; time.sleep(10**6)", RuntimeError, "closed its output", False),
        ("os.kill(os.getpid(), 9)", ProgramKilled, "ended with status -9", False),
        (
            "print('no idea', flush=True)",
            ValueError,
            "a line of the program is not an outcome: b'no id",
            False,
        ),
        ("print('[1]', flush=True)", ValueError, "a line of the program is not an outcome", False),
        ("say(reward='many')", ValueError, "the outcome is not", False),
        ("say(rewards=1)", ValueError, "the outcome is not", False),
        ("print('x' * 2**22, flush=True)", ValueError, "a line of the program is over 1048576 bytes", False),
    ],
)
async def test_a_task_that_fails_leaves_the_next_one_alone(
    do: str, error: type[Exception], why: str, *, stays: bool
) -> None:
    programs = standing()
    try:
        before = await programs.outcome(task(0))
        with pytest.raises(error, match=why):
            await programs.outcome(task(1, do))
        after = await programs.outcome(task(2))
        assert (after == before) is stays
        assert await programs.outcome(task(3, "say(reward=None)")) is None
    finally:
        await programs.close()


async def test_an_outcome_too_many_is_not_that_of_the_next_task() -> None:
    programs = standing()
    try:
        await programs.outcome(task(0, "say(reward=0.0); say(reward=1.0)"))
        with pytest.raises(ValueError, match="one line for each"):
            await programs.outcome(task(1, "say(reward=2.0)"))
    finally:
        await programs.close()


async def test_a_program_that_ended_between_two_tasks_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    programs = standing()
    try:
        before = await programs.outcome(task(0, "say(reward=os.getpid()); sys.exit(5)"))
        await programs._idle[0].process.wait()
        with caplog.at_level(logging.WARNING, "tether.programs"):
            assert await programs.outcome(task(1)) != before
        assert "program.ended status=5" in caplog.text
    finally:
        await programs.close()


async def test_cancelling_a_task_ends_its_program() -> None:
    programs = standing()
    await programs.outcome(task(0))
    process = programs._idle[0].process
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await programs.outcome(task(1, "import time; time.sleep(10**6)"))
    assert process.returncode == -signal.SIGKILL
    assert await programs.outcome(task(2)) != process.pid
    await programs.close()


async def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(SettingsError, match="no-such-program cannot be started: No such file"):
        await StandingPrograms(Launch(("no-such-program",)), 1).outcome(task(0))

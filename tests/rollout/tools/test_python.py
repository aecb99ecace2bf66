"""The tool `python`: what it answers, and what a cancelled call leaves behind."""

import asyncio
import os

import pytest

from reward.sandbox.runner import Limits
from rollout.sandboxes.runs import SandboxRuns
from rollout.tools.python import PythonTool

TOOL = PythonTool(Limits(wall_s=60), SandboxRuns(2))


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print(6 * 7)", "42\n"),
        ("x = 6\nx * 7", "42\n"),
        ("x = 6", "(no output)"),
        ("print('a'); raise SystemExit(3)", "a\n"),
    ],
)
async def test_an_answer_is_what_the_code_prints_and_its_last_value(code: str, answer: str) -> None:
    assert await TOOL.run(code) == answer


async def test_an_exception_is_answered_as_its_traceback() -> None:
    answer = await TOOL.run("print('before')\ndef f():\n    return 1 / 0\nf()")
    assert answer.startswith("before\nTraceback")
    assert 'File "code.py", line 3, in f' in answer
    assert answer.endswith("ZeroDivisionError: division by zero\n")
    assert "SyntaxError" in await TOOL.run("print(")


async def test_code_that_takes_too_long_or_dies_is_an_answer() -> None:
    assert (
        await PythonTool(Limits(wall_s=0.5), SandboxRuns(1)).run("while True: pass")
        == "error: not done within 0.5 s"
    )
    assert "the code was ended" in await TOOL.run("import os; os._exit(1)")


async def test_a_cancelled_call_leaves_no_process_and_no_descriptor() -> None:
    descriptors, before = len(os.listdir("/proc/self/fd")), _children()
    tool = PythonTool(Limits(wall_s=3600, cpu_s=3600), SandboxRuns(1))
    async with asyncio.timeout(60):
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(tool.run("while True: pass")) for _ in range(3)]
            while not _children() - before:  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.01)
            for task in running:
                task.cancel()
    assert all(task.cancelled() for task in running)
    assert _children() <= before
    assert len(os.listdir("/proc/self/fd")) <= descriptors


async def test_calls_that_wait_for_a_sandbox_have_nothing_open() -> None:
    runs, before = SandboxRuns(1), len(os.listdir("/proc/self/fd"))
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(runs.run("while True: pass", "", Limits(wall_s=60))) for _ in range(50)]
        await asyncio.sleep(0)  # each has begun, and waits
        assert len(os.listdir("/proc/self/fd")) < before + 20
        for task in running:
            task.cancel()


def _children() -> set[str]:
    """Return the processes that any thread of this one has started and that run, those of other tests too."""
    found: set[str] = set()
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/children") as children:
            found.update(children.read().split())
    return found

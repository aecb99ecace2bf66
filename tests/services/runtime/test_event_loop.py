"""The event loop of a process: the process ends although a task in it does not."""

import asyncio
import logging

import pytest

from services.runtime.event_loop import run_loop


async def ignoring(released: asyncio.Event) -> None:
    """Ignore cancellations until released."""
    while not released.is_set():
        try:
            await released.wait()
        except asyncio.CancelledError:
            continue


def test_a_task_that_does_not_end_is_named_and_left(caplog: pytest.LogCaptureFixture) -> None:
    released, obedient = asyncio.Event(), []

    async def main() -> tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]:
        loop = asyncio.get_running_loop()
        task = loop.create_task(ignoring(released), name="episode-3/1")
        obedient.append(loop.create_task(asyncio.Event().wait(), name="obedient"))
        await asyncio.sleep(0)
        return loop, task

    loop, task = run_loop(main(), end_s=0.01)
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "process.left_tasks tasks=episode-3/1"
    ]
    assert obedient[0].cancelled()
    assert not loop.is_closed()
    released.set()
    loop.run_until_complete(task)
    loop.close()


def test_a_loop_whose_tasks_end_is_closed() -> None:
    async def main() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert run_loop(main()).is_closed()

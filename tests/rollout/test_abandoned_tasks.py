"""Coroutines and threads that do not end when they are cancelled: their callers end, and their number is
limited."""

import asyncio
import logging
import threading

import pytest

from protocol.errors import TetherError
from protocol.host.call_threads import THREADS
from rollout.abandoned_tasks import AbandonedTasks
from tests.services.bus.harness import eventually


class Stubborn:
    """Ignores cancellations until it is released."""

    def __init__(self) -> None:
        self.begun, self.released = asyncio.Event(), asyncio.Event()
        self.ignored = 0

    async def run(self) -> str:
        self.begun.set()
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                self.ignored += 1
        return "done"


async def cancelled(abandoned_tasks: AbandonedTasks, stubborn: Stubborn, name: str) -> list[str]:
    """Cancel a call that runs a stubborn coroutine; return the names that were reported as left behind."""
    abandoned: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        calling = tasks.create_task(abandoned_tasks.run(stubborn.run, name, lambda: abandoned.append(name)))
        await stubborn.begun.wait()
        calling.cancel()
    assert calling.cancelled()
    return abandoned


async def test_running_episode_is_left_behind_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    abandoned_tasks, stubborn = AbandonedTasks(grace_s=0.01, max_abandoned=1), Stubborn()
    abandoned_tasks.check()
    with caplog.at_level(logging.INFO, "tether.strays"):
        assert await cancelled(abandoned_tasks, stubborn, "episode-3/1") == ["episode-3/1"]
        assert abandoned_tasks.counts() == {"left": 1, "ended": 0}
        with pytest.raises(TetherError, match=r"^1 episodes run on 0\.01 s .* such as episode-3/1: re"):
            abandoned_tasks.check()
        stubborn.released.set()
        await eventually(lambda: abandoned_tasks.counts() == {"left": 1, "ended": 1})
    abandoned_tasks.check()
    assert stubborn.ignored == 1
    assert caplog.messages == [
        "episode.stray task=episode-3/1 grace_s=0.01 strays=1",
        "episode.stray_ended task=episode-3/1 strays=0",
    ]


async def test_episode_that_ends_in_the_grace_time_is_waited_for_although_the_caller_is_cancelled_again() -> (
    None
):
    abandoned_tasks, stubborn = AbandonedTasks(grace_s=60), Stubborn()
    async with asyncio.TaskGroup() as tasks:
        calling = tasks.create_task(abandoned_tasks.run(stubborn.run, "episode-3/1"))
        await stubborn.begun.wait()
        calling.cancel()
        await eventually(lambda: stubborn.ignored == 1)
        calling.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not calling.done()
        stubborn.released.set()
    assert calling.cancelled()
    assert abandoned_tasks.counts() == {"left": 0, "ended": 0}


async def test_threads_of_cancelled_calls_are_left_behind_and_leave_threads_to_others() -> None:
    abandoned_tasks, released = AbandonedTasks(grace_s=60, max_abandoned=THREADS), threading.Event()
    started = threading.Semaphore(0)

    def block() -> None:
        started.release()
        released.wait(60)

    calls = THREADS - 1
    async with asyncio.TaskGroup() as tasks:
        blocked = [
            tasks.create_task(abandoned_tasks.run(lambda: asyncio.to_thread(block), f"episode-{i}"))
            for i in range(calls)
        ]
        for _ in blocked:
            await asyncio.to_thread(started.acquire)
        for task in blocked:
            task.cancel()
    try:
        assert abandoned_tasks.counts() == {"left": calls, "ended": 0}
        abandoned_tasks.check()
        more = [abandoned_tasks.run(lambda: asyncio.to_thread(int), "episode") for _ in range(THREADS)]
        for result in more:
            assert await result == 0
    finally:
        released.set()
    await eventually(lambda: abandoned_tasks.counts() == {"left": calls, "ended": calls})


@pytest.mark.parametrize("error", [KeyError("board"), SystemExit(3), asyncio.CancelledError()])
async def test_error_of_a_coroutine_reaches_its_caller(error: BaseException) -> None:
    async def raising() -> None:
        raise error

    with pytest.raises(type(error)):
        await AbandonedTasks().run(raising, "episode-3/1")

"""Threads that cancelled calls leave running."""

import asyncio
import threading

from protocol.host.call_threads import MAX_STUCK, THREADS, CallThreads, Futures, running


async def test_threads_are_replaced_when_half_are_stuck_and_the_process_when_there_are_too_many() -> None:
    threads, released = CallThreads(), threading.Event()

    async def call(count: int) -> Futures:
        futures = Futures()
        threads.follow(futures)
        started = threading.Semaphore(0)

        def wait() -> None:
            started.release()
            released.wait(60)

        loop = asyncio.get_running_loop()
        for _ in range(count):
            loop.run_in_executor(None, wait)
            await asyncio.to_thread(started.acquire)
        return running(futures)

    try:
        answers = [threads.abandon(await call(THREADS // 2)) for _ in range(2 * MAX_STUCK // THREADS)]
        assert answers == [False] * (len(answers) - 1) + [True]
    finally:
        released.set()
    assert await asyncio.to_thread(int) == 0


async def test_threads_that_end_are_not_counted() -> None:
    threads, futures = CallThreads(), Futures()
    threads.follow(futures)
    for _ in range(2 * MAX_STUCK):
        await asyncio.to_thread(int)
        assert not threads.abandon(futures)
    assert futures == set()

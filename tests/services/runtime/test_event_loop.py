"""The event loop of a process: the process ends although a task in it does not."""

import asyncio
import logging
import signal
import subprocess
import sys

import pytest

from services.runtime.event_loop import run_loop
from tests.integration.loop import ROOT

HELD = """
import asyncio, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
from services.runtime.event_loop import run_loop
class Loud(ThreadPoolExecutor):
    def shutdown(self, wait=True, **how):
        print("waits for its threads", flush=True)
        super().shutdown(wait, **how)
def hang():
    print("hangs", flush=True)
    threading.Event().wait()
async def main():
    asyncio.get_running_loop().set_default_executor(Loud())
    await asyncio.to_thread(hang)
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
run_loop(main())
"""
"""A program whose work in a thread does not end."""

LEFT = """
import asyncio, sys, threading
from rollout.abandoned_tasks import AbandonedTasks
from services.runtime.event_loop import exiting_without_threads, run_loop
async def main():
    abandoned, hangs, forever = AbandonedTasks(grace_s=0.1), threading.Event(), threading.Event()
    def hang():
        hangs.set()
        forever.wait()
    call = asyncio.create_task(abandoned.run(lambda: asyncio.to_thread(hang), "episode"))
    await asyncio.to_thread(hangs.wait)
    call.cancel()
    await asyncio.wait([call])
with exiting_without_threads():
    run_loop(main(), end_s=0.1)
    print("over")
    sys.exit(3) if len(sys.argv) > 1 else None
"""
"""A program with a cancelled call whose thread does not end; with an argument, its exit code is 3."""


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


def test_a_second_signal_ends_a_process_that_a_thread_holds() -> None:
    process = subprocess.Popen([sys.executable, "-c", HELD], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in ("hangs\n", "waits for its threads\n"):
            assert process.stdout.readline() == line
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == -signal.SIGINT
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("words", "code"), [([], 0), (["fails"], 3)])
def test_a_process_ends_although_the_thread_of_a_cancelled_call_does_not(words: list[str], code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LEFT, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (code, "over\n"), ended.stderr
    assert "process.left_threads threads=1" in ended.stderr


def test_a_loop_whose_tasks_end_is_closed() -> None:
    async def main() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert run_loop(main()).is_closed()

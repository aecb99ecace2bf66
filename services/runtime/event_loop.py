"""Runs a process's event loop and its background loops, and waits for events with a timeout."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

from protocol.host.call_threads import running_calls

log = logging.getLogger("tether")
T = TypeVar("T")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
END_S = 5.0
"""Seconds for the remaining tasks to end after their cancellation."""


def run_loop(
    main: Coroutine[Any, Any, T],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    *,
    end_s: float = END_S,
) -> T:
    """Run a coroutine in a new event loop and close the loop; `asyncio.run` would wait for all tasks.

    If a task does not end within `end_s`, or a cancelled call's thread still runs, the loop stays open and
    ends with the process, see `exiting_without_threads`. After a cancellation or Ctrl-C, the next signal ends
    the process: closing the loop, and the interpreter's exit, wait for other threads without limit.
    """
    runner = asyncio.Runner(loop_factory=loop_factory)
    try:
        return runner.run(main)
    except (KeyboardInterrupt, asyncio.CancelledError):
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_DFL)
        raise
    finally:
        if left := _still_running(runner.get_loop(), end_s):
            log.warning("process.left_tasks tasks=%s", ",".join(sorted(left)))
        elif threads := running_calls():
            log.warning("process.left_threads threads=%d", len(threads))
        else:
            runner.close()


@contextlib.contextmanager
def exiting_without_threads() -> Iterator[None]:
    """End the process with the block if a cancelled call's thread still runs; the exit would wait for it."""
    try:
        yield
    except SystemExit as ended:
        _exit_if_threads_are_left(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
        raise
    _exit_if_threads_are_left(0)


def _exit_if_threads_are_left(code: int) -> None:
    if running_calls():
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _still_running(loop: asyncio.AbstractEventLoop, end_s: float) -> list[str]:
    """Cancel all tasks; return the names of the tasks that still run after `end_s`."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=end_s))
    return [task.get_name() for task in tasks if not task.done()]


@contextlib.asynccontextmanager
async def running_loops(loops: Mapping[str, Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run named loops as tasks during the block, and cancel them at its end.

    Raises:
        ExceptionGroup: a loop or the block raised; the other loops were cancelled.
    """
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(loop, name=name) for name, loop in loops.items()]
        yield
        for task in running:
            task.cancel()


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait at most `seconds` for an event; return whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


def stop_at_signals(stop: asyncio.Event) -> None:
    """Set `stop` on SIGTERM or SIGINT, and cancel the calling task on the second signal."""
    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    assert main is not None

    def on_signal() -> None:
        if stop.is_set():
            main.cancel()
        stop.set()

    for signum in STOP_SIGNALS:
        loop.add_signal_handler(signum, on_signal)

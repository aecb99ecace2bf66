"""Runs programs in the verifiers' sandbox from an event loop, with limited concurrency."""

import asyncio
import functools
import logging
import os
from concurrent.futures import ThreadPoolExecutor

from reward.sandbox.runner import NEEDED, Limits, Verdict, run_programs

log = logging.getLogger("tether.tools")


class SandboxRuns:
    """Runner with a limited number of concurrent sandboxes."""

    def __init__(self, parallel: int) -> None:
        """Run at most `parallel` programs concurrently; others wait."""
        self._threads = ThreadPoolExecutor(parallel, thread_name_prefix="tool-sandbox")
        self._free = asyncio.Semaphore(parallel)
        """Acquired before descriptors are opened, because a worker may have thousands of episodes."""

    async def run(self, program: str, text: str, limits: Limits) -> Verdict:
        """Run a program with an input. Cancelling kills it and waits for its end.

        Raises:
            RewardError: the sandbox cannot be set up.
        """
        async with self._free:
            read, write = os.pipe()
            try:
                verdict = await self._run(program, text, limits, read, write)
            finally:
                os.close(read)
                os.close(write)
        _warn(verdict.isolation)
        return verdict

    async def _run(self, program: str, text: str, limits: Limits, read: int, write: int) -> Verdict:
        future = self._threads.submit(run_programs, program, [text], limits, read)
        wrapped = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(wrapped)
        except asyncio.CancelledError:
            if not future.cancel():
                os.write(write, b"x")
                await asyncio.wait([wrapped])
                if not wrapped.cancelled():
                    wrapped.exception()  # mark the exception as retrieved
            raise


@functools.cache
def _warn(isolation: frozenset[str]) -> None:
    """Log, once per worker, the kinds of isolation that this machine lacks."""
    if missing := sorted(NEEDED - isolation):
        log.warning("sandbox.weak missing=%s (see docs/security.md)", ",".join(missing))

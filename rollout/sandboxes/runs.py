"""Runs programs in the sandbox from an event loop, a bounded number at once."""

import asyncio
import functools
import logging
import os
from concurrent.futures import ThreadPoolExecutor

from reward.sandbox.runner import NEEDED, Limits, Verdict, run_programs

log = logging.getLogger("tether.tools")


class SandboxRuns:
    """A number of sandboxes."""

    def __init__(self, parallel: int) -> None:
        """Run at most `parallel` programs at once; others wait."""
        self._threads = ThreadPoolExecutor(parallel, thread_name_prefix="tool-sandbox")
        self._free = asyncio.Semaphore(parallel)
        """Whoever waits for it has no descriptors open: a worker may have thousands of episodes."""

    async def run(self, program: str, text: str, limits: Limits) -> Verdict:
        """Run a program with an input. Cancelling kills it, and waits until it has ended.

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
                    wrapped.exception()  # it is of no interest any more
            raise


@functools.cache
def _warn(isolation: frozenset[str]) -> None:
    """Log, once for each worker, which kinds of isolation this machine does not offer."""
    if missing := sorted(NEEDED - isolation):
        log.warning("sandbox.weak missing=%s (see docs/security.md)", ",".join(missing))

"""Stages versions for engines whose parameters are in this process, by a fetch in a thread."""

import asyncio

from protocol.errors import WeightError
from protocol.messages import WeightManifest
from rollout.engines.base import Served
from rollout.staging.staging import Staging

CANCEL_S = 0.05
"""Interval of attempts to end a cancelled fetch."""


class InProcessStaging:
    """Staging copy in this process, filled by one fetch at a time in a thread of its own."""

    def __init__(self, staging: Staging, timeout_s: float) -> None:
        """Fill `staging`; `timeout_s` bounds each fetch."""
        self.staging = staging
        self._timeout_s = timeout_s
        self._fetching: asyncio.Future[int] | None = None
        self._asleep = False

    async def stage(self, manifest: WeightManifest) -> None:
        """Fetch and verify a version, unless exactly that version is staged.

        A cancelled call returns when the thread has ended the fetch; then no version is staged. Cancelled
        once more it returns at once; until the thread has ended the fetch, further calls are refused.

        Raises:
            WeightError: no version is staged.
        """
        if self._asleep:
            raise WeightError(
                f"version {manifest.version}: the engine sleeps, there is no memory to stage in"
            )
        if self._fetching is not None:
            raise WeightError(f"version {manifest.version}: another version is being staged")
        if self.staging.staged == Served(manifest.epoch, manifest.version, manifest.digest):
            return
        self.staging.discard()  # a cancel that came too late for the version before
        fetching = self._fetching = asyncio.get_running_loop().run_in_executor(
            None, self.staging.fetch, manifest, self._timeout_s
        )
        cancelled = False

        def end(ended: asyncio.Future[int]) -> None:
            self._fetching = None
            if cancelled:
                ended.exception()  # marks it as retrieved
                self.staging.discard()

        fetching.add_done_callback(end)
        try:
            await asyncio.shield(fetching)
        except asyncio.CancelledError:
            cancelled = True
            while not fetching.done():  # repeatedly: the first may come before the fetch has begun
                self.staging.cancel()
                await asyncio.wait([fetching], timeout=CANCEL_S)
            self.staging.discard()
            raise
        finally:
            del fetching  # its error refers to this frame, and to the tensors that the fetch has read

    async def sleep(self) -> None:
        """Discard the staged version, and refuse to stage until `wake`; a cancelled call does so too.

        Raises:
            WeightError: a version is being staged and stays.
        """
        if self._fetching is not None:
            raise WeightError("a version is being staged: the engine cannot sleep now")
        self._asleep = True
        self.staging.discard()
        await asyncio.to_thread(self.staging.close)  # it may wait

    def wake(self) -> None:
        """Allow staging: the memory of the copy was taken again."""
        self._asleep = False

"""Stages versions in a thread, for engines whose parameters are in this process."""

import asyncio

from protocol.errors import WeightError
from protocol.messages import WeightManifest
from rollout.engines.base import Served
from rollout.staging.staging import Staging

CANCEL_S = 0.05
"""Seconds between attempts to cancel a fetch."""


class InProcessStaging:
    """Staging copy in this process; one fetch at a time fills it, in a thread."""

    def __init__(self, staging: Staging, timeout_s: float) -> None:
        """Fill `staging`; `timeout_s` limits each fetch."""
        self.staging = staging
        self._timeout_s = timeout_s
        self._fetching: asyncio.Future[int] | None = None
        self._asleep = False

    async def stage(self, manifest: WeightManifest) -> None:
        """Fetch and verify a version, unless exactly this version is staged.

        A cancelled call returns after the thread has ended the fetch; then no version is staged. If cancelled
        again, it returns immediately; further calls are refused until the thread has ended the fetch.

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
        self.staging.discard()  # clear a cancel that came too late for the previous version
        fetching = self._fetching = asyncio.get_running_loop().run_in_executor(
            None, self.staging.fetch, manifest, self._timeout_s
        )
        cancelled = False

        def end(ended: asyncio.Future[int]) -> None:
            self._fetching = None
            if cancelled:
                ended.exception()  # mark the exception as retrieved
                self.staging.discard()

        fetching.add_done_callback(end)
        try:
            await asyncio.shield(fetching)
        except asyncio.CancelledError:
            cancelled = True
            while not fetching.done():  # repeatedly, because the first cancel may precede the fetch
                self.staging.cancel()
                await asyncio.wait([fetching], timeout=CANCEL_S)
            self.staging.discard()
            raise
        finally:
            del fetching  # its exception refers to this frame and to the tensors that were read

    async def sleep(self) -> None:
        """Discard the staged version, and refuse to stage until `wake`, even if the call is cancelled.

        Raises:
            WeightError: a version is being staged; staging continues.
        """
        if self._fetching is not None:
            raise WeightError("a version is being staged: the engine cannot sleep now")
        self._asleep = True
        self.staging.discard()
        await asyncio.to_thread(self.staging.close)  # may block

    def wake(self) -> None:
        """Allow staging again: the memory of the copy was reallocated."""
        self._asleep = False

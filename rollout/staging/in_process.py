"""Staging for engines whose parameters live in this process: the fetch runs in a thread, and cancellation
reaches it."""

import asyncio

from protocol.errors import WeightError
from protocol.messages import WeightManifest
from rollout.engines.base import Served
from rollout.staging.staging import Staging

CANCEL_S = 0.05
"""Between two attempts to end a fetch."""


class InProcessStaging:
    """Runs one fetch at a time in a thread of its own."""

    def __init__(self, staging: Staging, timeout_s: float) -> None:
        self.staging = staging
        self._timeout_s = timeout_s
        self._fetching: asyncio.Future[int] | None = None
        self._asleep = False

    async def stage(self, manifest: WeightManifest) -> None:
        """Fetch and verify, unless the very version is staged. A cancelled call returns when the thread has
        let go; then nothing is staged.

        Cancelled once more it returns at once; until the thread has let go, further calls are refused.

        Raises:
            WeightError: nothing is staged.
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

        def end(_: object) -> None:
            self._fetching = None
            if cancelled:
                fetching.exception()  # has been looked at
                self.staging.discard()

        fetching.add_done_callback(end)
        try:
            await asyncio.shield(fetching)
        except asyncio.CancelledError:
            cancelled = True
            while not fetching.done():  # again and again: the first may come before the fetch has begun
                self.staging.cancel()
                await asyncio.wait([fetching], timeout=CANCEL_S)
            self.staging.discard()
            raise

    def sleep(self) -> None:
        """Forget what is staged; refuse to stage until `wake`. Raises WeightError while a version is being
        staged."""
        if self._fetching is not None:
            raise WeightError("a version is being staged: the engine cannot sleep now")
        self._asleep = True
        self.staging.discard()
        self.staging.close()

    def wake(self) -> None:
        """The copy's memory is there again."""
        self._asleep = False

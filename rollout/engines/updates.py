"""Staging for engines whose parameters live in this process: the fetch runs in a thread, and cancellation reaches it."""

import asyncio
from contextlib import suppress

from protocol.errors import WeightError
from protocol.messages import WeightManifest
from rollout.engines.staging import Staging


class LocalUpdates:
    """Runs one fetch at a time in a thread of its own."""

    def __init__(self, staging: Staging, timeout_s: float) -> None:
        self.staging = staging
        self._timeout_s = timeout_s
        self._busy = False

    async def stage(self, manifest: WeightManifest) -> None:
        """Fetch and verify. A cancelled call returns when the thread has let go; then nothing is staged.

        Raises:
            WeightError: nothing is staged.
        """
        if self._busy:
            raise WeightError(f"version {manifest.version}: another version is being staged")
        self._busy = True
        fetching = asyncio.get_running_loop().run_in_executor(None, self.staging.fetch, manifest, self._timeout_s)
        try:
            await asyncio.shield(fetching)
        except asyncio.CancelledError:
            self.staging.cancel()
            await asyncio.wait([fetching])
            with suppress(WeightError):
                fetching.result()
            self.staging.discard()
            raise
        finally:
            self._busy = False

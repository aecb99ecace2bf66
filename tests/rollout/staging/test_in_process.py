"""Tests cancelled staging: nothing is staged, and no thread still writes to the copy."""

import asyncio
import gc
import os
import threading
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from protocol.errors import WeightError
from protocol.messages import WeightManifest
from rollout.engines.contract.models import write_shm
from rollout.staging.in_process import InProcessStaging
from rollout.staging.staging import Staging
from tests.rollout.staging.models import NEW, OLD, staging


class FailingStaging(Staging):
    """Fails while it reads memory."""

    def __init__(self) -> None:
        super().__init__({})
        self.released = threading.Event()

    def fetch(self, manifest: WeightManifest, deadline_s: float) -> int:
        memory = torch.zeros(3)
        weakref.finalize(memory, self.released.set)
        raise WeightError(f"failed with {len(memory)} elements read")


async def test_memory_of_a_fetch_that_failed_is_not_kept_by_its_error(tmp_path: Path) -> None:
    failing = FailingStaging()
    gc.disable()
    try:
        with suppress(WeightError):
            await InProcessStaging(failing, timeout_s=20).stage(write_shm(tmp_path / "v1", OLD, 1))
        assert await asyncio.to_thread(failing.released.wait, 20)
    finally:
        gc.enable()


async def test_stage_is_refused_until_the_thread_of_a_cancelled_one_has_ended(tmp_path: Path) -> None:
    updates = InProcessStaging(staging(), timeout_s=20)
    stuck, good = write_shm(tmp_path / "v1", OLD, 1), write_shm(tmp_path / "v2", NEW, 2)
    pipe = tmp_path / "v1" / "bucket_00000.bin"
    pipe.unlink()
    os.mkfifo(pipe)  # opening it waits for a writer
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        fetching = tasks.create_task(updates.stage(stuck))
        for _ in range(2):
            await asyncio.sleep(0)
            fetching.cancel()
        await asyncio.wait([fetching])
        with pytest.raises(WeightError, match="being staged"):
            await updates.stage(good)
        with pipe.open("wb"):
            pass
        while True:
            try:
                await updates.stage(good)
                break
            except WeightError:
                await asyncio.sleep(0.01)
    assert updates.staging.take(good).version == 2

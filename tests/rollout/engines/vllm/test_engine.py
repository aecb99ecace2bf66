"""Tests that a call to vLLM's processes ends when they die."""

import asyncio
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from protocol.errors import PoisonedError
from rollout.engines.base import EngineConfig
from rollout.engines.multi_process.rank_rpc import CALL_TIMEOUT_S
from rollout.engines.registry import make_engine
from tests.contracts.engine_models import tiny_model, weights, write_shm


@pytest.mark.engine
@pytest.mark.slow
async def test_commit_whose_engine_dies_ends_at_once(tmp_path: Path) -> None:
    model = tiny_model(1)
    model.save_pretrained(tmp_path / "model")
    engine = make_engine(EngineConfig(max_model_len=64), tmp_path / "model", "e")
    await engine.start()
    try:
        manifest = write_shm(tmp_path / "v1", weights(model), 1)
        await engine.stage(manifest)
        (core,) = multiprocessing.active_children()
        assert core.pid is not None
        os.kill(core.pid, signal.SIGSTOP)
        async with asyncio.TaskGroup() as tasks:
            commit = tasks.create_task(refused(engine.commit(manifest)))
            await asyncio.sleep(0)
            os.kill(core.pid, signal.SIGKILL)
            async with asyncio.timeout(CALL_TIMEOUT_S / 2):
                await commit
    finally:
        await engine.close()


async def refused(commit: object) -> None:
    with pytest.raises(PoisonedError, match="has ended"):
        await commit  # type: ignore[misc]

"""Tests that a call to vLLM's processes ends when they die."""

import asyncio
import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from protocol.errors import EngineError, PoisonedError
from rollout.engines.base import EngineConfig
from rollout.engines.contract.models import tiny_model, weights, write_shm
from rollout.engines.multi_process.rank_rpc import CALL_TIMEOUT_S, socket_path
from rollout.engines.registry import make_engine
from rollout.engines.vllm.engine import VllmEngine


async def test_an_engine_that_has_lost_a_rank_counts_as_dead(tmp_path: Path) -> None:
    engine = VllmEngine(EngineConfig(), tmp_path, "e")
    engine._vllm.llm = SimpleNamespace(errored=False)  # vLLM notices later
    async with await asyncio.start_unix_server(lambda _, writer: writer.close(), socket_path(tmp_path, 0)):
        await engine.check()
        await engine._vllm.connect(tmp_path, 1)
        while not engine._vllm.rank_lost:  # noqa: ASYNC110 (told by a callback)
            await asyncio.sleep(0)
        with pytest.raises(EngineError, match="died"):
            await engine.check()


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

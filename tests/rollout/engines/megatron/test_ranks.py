"""Tests the engine `megatron` on two tensor ranks beyond the contract suite: families, a rank that dies."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from protocol.errors import EngineError, EngineSettingsError
from rollout.engines.base import Request, Sampling
from rollout.engines.contract.bench import together
from rollout.engines.contract.models import weights, write_shm
from rollout.engines.megatron.engine import MegatronEngine
from tests.changes import slow_unless_changed
from tests.rollout.engines.megatron.test_engine import LENGTH, is_greedy, ragged_requests, started
from tests.trainer.megatron.models import ALL_MODELS, make_model, save_model

pytestmark = slow_unless_changed("rollout/engines/megatron/", "trainer/megatron/inference")


@pytest.mark.parametrize(
    "name", ["phi", "gemma3", "deepseek-v2-dense", "qwen2-moe", "deepseek-v3", "gpt-oss", "mixtral"]
)
async def test_two_ranks_serve_what_one_model_computes(name: str, tmp_path: Path) -> None:
    vocabulary = int(ALL_MODELS[name][1]["vocab_size"])
    model_dir, model = save_model(name, tmp_path / "model"), make_model(name).eval()
    requests = ragged_requests(12, vocabulary)
    for parameter in model.parameters():
        parameter.data += 0.01
    version = write_shm(tmp_path / "v0", weights(model), 0)
    async with started(model_dir, tensor_parallel_size=2, max_running=5, max_batch_tokens=LENGTH) as engine:
        first = await together(engine, requests)
        await engine.stage(version)
        await engine.commit(version)
        second = await together(engine, requests)
    unchanged = make_model(name).eval()
    for request, before, after in zip(requests, first, second, strict=True):
        assert is_greedy(unchanged, request, before)
        assert is_greedy(model, request, after)
        assert after.spans == ((len(after.tokens), 0),)


async def kill_while_it_generates(engine: MegatronEngine, pid: int) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.generate(Request("a/0", (1,), Sampling(max_tokens=60))), name="a/0")
        await engine.pause()
        os.kill(pid, signal.SIGKILL)
        with suppress(EngineError):
            await engine.resume()


async def test_dead_rank_ends_the_engine_with_the_reason(tmp_path: Path) -> None:
    async with started(save_model("qwen2", tmp_path), tensor_parallel_size=2) as engine:
        assert engine._ranked is not None
        with pytest.raises(ExceptionGroup) as caught:
            await kill_while_it_generates(engine, engine._ranked.processes._processes[1].pid)
        assert caught.group_contains(EngineError, match="request a/0: ")
        with pytest.raises(EngineError, match="rank 1 has ended with code -9"):
            await engine.check()


async def test_two_ranks_record_the_experts_that_one_records(tmp_path: Path) -> None:
    model_dir = save_model("qwen3-moe", tmp_path)
    requests = ragged_requests(6, int(ALL_MODELS["qwen3-moe"][1]["vocab_size"]))
    found = []
    for ranks in (1, 2):
        settings = {"tensor_parallel_size": ranks, "enable_return_routed_experts": True, "max_running": 4}
        async with started(model_dir, **settings) as engine:
            found.append(await together(engine, requests))
    for request, one, two in zip(requests, *found, strict=True):
        assert one.tokens == two.tokens
        assert one.experts is not None
        assert two.experts is not None
        assert len(two.experts) == len(request.prompt) + len(two.tokens) - 1
        assert (np.sort(one.experts) == np.sort(two.experts)).all()


async def test_heads_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineSettingsError, match="tensor_parallel_size 3 does not divide the 4 heads"):
        async with started(save_model("qwen2", tmp_path), tensor_parallel_size=3):
            pass


async def test_passes_whose_experts_exceed_an_answer_are_refused(tmp_path: Path) -> None:
    given = {"tensor_parallel_size": 2, "enable_return_routed_experts": True, "max_batch_tokens": 2**24}
    with pytest.raises(EngineSettingsError, match=r"max_model_len .* passes of 16777216 tokens; .* at most"):
        async with started(save_model("qwen3-moe", tmp_path), **given):
            pass

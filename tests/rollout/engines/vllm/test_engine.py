"""Tests calls to vLLM's processes: when they die, and (slow) beside a step in flight."""

import asyncio
import copy
import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from protocol.errors import EngineError, PoisonedError
from rollout.engines.base import Engine, EngineConfig, KvPolicy, Request, Sampling
from rollout.engines.contract.bench import MAX_MODEL_LEN, PROMPTS, Bench
from rollout.engines.contract.models import tiny_model, weights, write_shm
from rollout.engines.multi_process.rank_rpc import CALL_TIMEOUT_S, socket_path
from rollout.engines.registry import make_engine
from rollout.engines.vllm.engine import VllmEngine
from tests.changes import slow_unless_changed
from tests.contracts.engine_models import tiny_hybrid, tiny_latent
from tests.contracts.vllm_overlap import overlapping


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


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="commits are counted by the extension for a CPU")
@pytest.mark.parametrize(("kv", "is_behind"), [(KvPolicy.KEEP, True), (KvPolicy.RECOMPUTE, False)])
async def test_commit_waits_for_the_step_in_flight_only_where_kv_is_recomputed(
    tmp_path: Path, kv: KvPolicy, is_behind: bool
) -> None:
    config = EngineConfig(max_model_len=MAX_MODEL_LEN, kv=kv)
    model = tiny_model(1)
    model.save_pretrained(tmp_path / "model")
    engine = make_engine(config, tmp_path / "model", "e")
    try:
        with overlapping(engine):
            await engine.start()
        bench = Bench(engine, kv, {"A": model}, tmp_path, {"A": weights(model)})
        await bench.serve("A")
        async with bench.long(*PROMPTS):
            for _ in range(10):
                await bench.serve("A")
        (behind,) = await engine._call("behind")
        assert bool(behind) is is_behind
    finally:
        await engine.close()


@pytest.mark.engine
@slow_unless_changed("rollout/engines/vllm/worker.py", "rollout/engines/vllm/layers/")
async def test_layers_that_compute_with_tensors_made_after_loading_are_not_shared(tmp_path: Path) -> None:
    tiny_latent(1, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    config = EngineConfig(dtype="bfloat16", max_model_len=64, max_running=4)
    engine = make_engine(config, tmp_path / "model", "e", shared=tmp_path / "e.msgpack")
    with pytest.raises(
        EngineError, match=r"layer model\.layers\.0\.self_attn\S* computes with tensors that vLLM"
    ):
        await engine.start()
    await engine.close()
    assert not (tmp_path / "e.msgpack").exists()


@pytest.mark.engine
@slow_unless_changed("rollout/staging/", "rollout/engines/vllm/worker.py")
async def test_decays_that_vllm_keeps_in_float32_take_versions_in_bfloat16(tmp_path: Path) -> None:
    half = torch.bfloat16
    models = [tiny_hybrid(seed, dtype=half) for seed in (1, 2)]
    copy.deepcopy(models[0]).to(half).save_pretrained(tmp_path / "model")
    config = EngineConfig(dtype="bfloat16", max_model_len=64, max_running=4, memory_fraction=0.1)
    engine = make_engine(config, tmp_path / "model", "e")
    await engine.start()
    try:
        loaded, found = await greedy(engine), []
        for version, model in enumerate((models[0], models[1], models[0])):
            manifest = write_shm(tmp_path / f"v{version}", weights(model, half), version)
            await engine.stage(manifest)
            await engine.commit(manifest)
            assert await engine.live_digest() == manifest.digest  # type: ignore[attr-defined]
            found.append(await greedy(engine))
        assert found[0] == found[2] == loaded != found[1]
    finally:
        await engine.close()


async def greedy(engine: Engine) -> tuple[int, ...]:
    sampling = Sampling(max_tokens=16, temperature=0)
    return (await engine.generate(Request("greedy/0", PROMPTS[0], sampling))).tokens

"""Tests that a sleeping engine holds no memory, and serves after waking what is committed then."""

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from protocol.errors import EngineSettingsError
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from rollout.engines.base import EngineConfig
from rollout.engines.contract.bench import MAX_MODEL_LEN, PROMPTS, ask
from rollout.engines.contract.models import tiny_model, weights, write_shm
from rollout.engines.hf.engine import HFEngine
from rollout.engines.registry import ENGINES, make_engine
from rollout.engines.sglang_jax.engine import SglangJaxEngine
from tests.contracts.engine_models import adapted
from tests.contracts.sglang_environment import sglang_settings
from tests.contracts.sglang_jax_environment import sglang_jax_settings

GIB = 1 << 30
FRACTION = 0.1
"""Share of the GPU's memory for an awake engine."""
CONTEXT_BYTES = 3 * GIB
"""What a CUDA context, its libraries and captured graphs may keep on the device."""


@pytest.mark.parametrize("lora", [NO_ADAPTERS, LoraConfig(rank=4)], ids=["whole", "lora"])
async def test_sleeping_hf_engine_holds_no_weights(tmp_path: Path, lora: LoraConfig) -> None:
    model = tiny_model(1)
    model.save_pretrained(tmp_path / "model")
    tensors = adapted(model, lora, 1)[1] if lora.rank else weights(model)
    engine = HFEngine(EngineConfig(name="hf", max_model_len=MAX_MODEL_LEN), tmp_path / "model", "e", lora)
    await engine.start()
    try:
        for version in range(2):
            manifest = write_shm(tmp_path / f"v{version}", tensors, version)
            await engine.stage(manifest)
            await engine.commit(manifest)
            tokens = (await engine.generate(ask("before", PROMPTS[0], 16))).tokens
            held = [
                *engine._model.weights.live.values(),
                *engine._model.weights.copy.values(),
                *engine._model.decoder._model.parameters(),
            ]  # type: ignore[attr-defined]
            await engine.sleep()
            assert [tuple(tensor.shape) for tensor in held if tensor.untyped_storage().nbytes()] == []
            await engine.wake()
            await engine.stage(manifest)
            await engine.commit(manifest)
            assert (await engine.generate(ask("after", PROMPTS[0], 16))).tokens == tokens
    finally:
        await engine.close()


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
async def test_sleeping_sglang_jax_has_no_weights_no_cache_and_no_staged_version(tmp_path: Path) -> None:
    model = tiny_model(1)
    model.save_pretrained(tmp_path / "model")
    cache: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "kv_cache_mb": 256, "max_running": 1 << 16}
    config = EngineConfig(name="sglang_jax", **cache, **sglang_jax_settings())
    engine = SglangJaxEngine(config, tmp_path / "model", "e")
    await engine.start()
    try:
        assert engine._child is not None
        child, file = psutil.Process(engine._child._ranks._processes[0].pid), engine._child._file

        def held() -> int:
            return int(child.memory_full_info().uss)

        manifest = write_shm(tmp_path / "v0", weights(model), 0)
        await engine.stage(manifest)
        await engine.commit(manifest)
        tokens = (await engine.generate(ask("before", PROMPTS[0], 16))).tokens
        awake = held()
        assert os.fstat(file).st_blocks > 0
        await engine.sleep()
        assert awake - held() > 200 << 20
        assert os.fstat(file).st_blocks == 0
        await engine.wake()
        await engine.stage(manifest)
        await engine.commit(manifest)
        assert (await engine.generate(ask("after", PROMPTS[0], 16))).tokens == tokens
    finally:
        await engine.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM can sleep on a GPU")
async def test_vllm_sleep_mode_on_a_cpu_is_refused_by_name(tmp_path: Path) -> None:
    tiny_model(1).save_pretrained(tmp_path)
    engine = make_engine(EngineConfig(name="vllm", enable_sleep_mode=True), tmp_path, "e")
    with pytest.raises(
        EngineSettingsError, match=r"engine\.enable_sleep_mode is true, but vLLM cannot sleep on a CPU"
    ):
        await engine.start()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    ["hf", *(pytest.param(name, marks=pytest.mark.engine) for name in ENGINES.having("started_to_sleep"))],
)
@pytest.mark.timeout(600)
async def test_sleeping_engine_leaves_the_gpu_to_others(tmp_path: Path, name: str) -> None:
    half = torch.bfloat16
    model = tiny_model(1, dtype=half)
    model.save_pretrained(tmp_path / "model")
    free = torch.cuda.mem_get_info()[0]
    asked: dict[str, Any] = sglang_settings() if name == "sglang" else {}
    config = EngineConfig(
        name=name,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        memory_fraction=FRACTION,
        enable_sleep_mode=ENGINES[name].started_to_sleep,
        **asked,
    )
    engine = make_engine(config, tmp_path / "model", "e")
    await engine.start()
    try:
        for version in range(3):
            manifest = write_shm(tmp_path / f"v{version}", weights(model, half), version)
            await engine.stage(manifest)
            await engine.commit(manifest)
            assert await engine.live_digest() == manifest.digest  # type: ignore[attr-defined]
            await engine.generate(ask("some", PROMPTS[0], 16))
            if ENGINES[name].started_to_sleep:
                assert free - torch.cuda.mem_get_info()[0] > FRACTION / 2 * torch.cuda.mem_get_info()[1]
            await engine.sleep()
            given = torch.cuda.mem_get_info()[0]
            assert given > free - CONTEXT_BYTES
            taken = torch.empty(given - GIB, dtype=torch.uint8, device="cuda")
            taken.fill_(0xFF)  # what the engine mapped there before is overwritten
            del taken
            torch.cuda.empty_cache()
            await engine.wake()
    finally:
        await engine.close()

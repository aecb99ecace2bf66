"""Tests adapters that requests name with the engine `megatron`, which transformers computes merged."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import EngineError
from protocol.weights.lora import LoraConfig
from rollout.engines.base import EngineConfig
from rollout.engines.contract.bench import together
from rollout.engines.megatron.engine import MegatronEngine
from tests.changes import slow_unless_changed
from tests.rollout.engines.megatron.test_engine import LENGTH, is_greedy, ragged_requests
from tests.services.serving.test_adapters import write_adapter
from tests.trainer.megatron.models import ALL_MODELS, make_model, save_model

OTHER = slow_unless_changed("rollout/engines/megatron/", "trainer/megatron/inference")
CONFIGS = {
    "wide": LoraConfig(rank=4, alpha=32.0, target_modules=("q_proj", "o_proj")),
    "narrow": LoraConfig(rank=3, alpha=9.0, target_modules=("q_proj",), use_rslora=True),
}


def engine_with(model_dir: Path, adapters: dict[str, Path], **settings: Any) -> MegatronEngine:
    config = EngineConfig(name="megatron", max_model_len=LENGTH, max_running=5, **settings)
    return MegatronEngine(config, model_dir, "e", named=adapters)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param("deepseek-v3", 1),
        pytest.param("qwen2", 2, marks=OTHER),
        pytest.param("gpt-oss", 2, marks=OTHER),
    ],
)
async def test_requests_of_one_batch_have_each_the_adapter_that_they_name(
    name: str, ranks: int, tmp_path: Path
) -> None:
    model_dir = save_model(name, tmp_path / "model")
    configs = CONFIGS
    if name == "deepseek-v3":
        configs = {
            "wide": LoraConfig(rank=4, alpha=32.0, target_modules=("q_b_proj", "o_proj")),
            "narrow": LoraConfig(rank=3, alpha=9.0, target_modules=("o_proj",)),
        }
    models = {"": make_model(name).eval()}
    for seed, (adapter, config) in enumerate(configs.items()):
        models[adapter] = write_adapter(model_dir, tmp_path / adapter, config, seed).eval()
    adapters = {adapter: tmp_path / adapter for adapter in configs}
    asked = ragged_requests(6, int(ALL_MODELS[name][1]["vocab_size"]))
    requests = [
        replace(request, id=f"{request.id}/{adapter}", adapter=adapter)
        for request in asked
        for adapter in models
    ]
    engine = engine_with(model_dir, adapters, tensor_parallel_size=ranks)
    try:
        await engine.start()
        found = await together(engine, requests)
    finally:
        await engine.close()
    for request, completion in zip(requests, found, strict=True):
        assert is_greedy(models[request.adapter], request, completion)
    plain = {request.id: completion.tokens for request, completion in zip(requests, found, strict=True)}
    assert any(plain[f"{request.id}/wide"] != plain[f"{request.id}/"] for request in asked)


async def test_adapter_of_a_layer_that_a_step_merges_is_refused_by_name(tmp_path: Path) -> None:
    model_dir = save_model("deepseek-v2-dense", tmp_path / "model")
    config = LoraConfig(rank=2, target_modules=("kv_b_proj",))
    write_adapter(model_dir, tmp_path / "first", config, 0)
    engine = engine_with(model_dir, {"first": tmp_path / "first"})
    with pytest.raises(EngineError, match="adapter 'first': engine megatron has none by name for kv_b_proj"):
        await engine.start()
    await engine.close()

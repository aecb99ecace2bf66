"""Tests models and interpreters that the engine `sglang_jax` refuses, and the size of its cache."""

import sys
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import EngineSettingsError
from rollout.engines.base import EngineConfig
from rollout.engines.sglang_jax.model_check import check_interpreter, check_model, config_overrides, slots_of

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
}
PLACE = Path("models/tiny")


def engine(**settings: Any) -> EngineConfig:
    return EngineConfig(name="sglang_jax", **settings)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_families_of_sglang_jax_are_served(family: str) -> None:
    check_model(engine(), {**MODEL, "model_type": family}, PLACE)


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        ({"model_type": "llama"}, {}, "llama"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, {}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {}, "linear"),
        ({"use_sliding_window": True}, {}, "use_sliding_window"),
        ({}, {"dtype": "float16"}, "float16"),
        ({}, {"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({}, {"max_model_len": 8192}, "max_model_len"),
    ],
)
def test_model_that_would_be_computed_wrongly_is_refused_by_name(
    change: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(EngineSettingsError, match=words):
        check_model(engine(**settings), MODEL | change, PLACE)


@pytest.mark.parametrize(
    ("change", "base"),
    [({}, 1e4), ({"rope_theta": 1e6}, 1e6), ({"rope_parameters": {"rope_theta": 1e6}}, 1e6)],
)
def test_rotary_base_is_found_where_either_transformers_writes_it(
    change: dict[str, Any], base: float
) -> None:
    assert config_overrides(MODEL | change) == {"rope_theta": base}


def test_cache_holds_as_many_requests_as_fit() -> None:
    # 2 layers x 2 heads x 32 x keys and values x 4 bytes: 1 KiB a token, 1 MiB a request
    assert slots_of(engine(kv_cache_mb=7, max_model_len=1024), MODEL) == 7
    assert slots_of(engine(kv_cache_mb=7, max_model_len=1024, max_running=3), MODEL) == 3
    with pytest.raises(EngineSettingsError, match=r"kv_cache_mb 1 .* takes 4 MiB"):
        slots_of(engine(kv_cache_mb=1, max_model_len=4096), MODEL)


def test_interpreter_without_sglang_jax_is_refused_by_name() -> None:
    with pytest.raises(EngineSettingsError, match=r"engine\.python.*sglang-jax\.txt.*sglang-jax"):
        check_interpreter(sys.executable)
    with pytest.raises(EngineSettingsError, match="no-python"):
        check_interpreter("no-python")

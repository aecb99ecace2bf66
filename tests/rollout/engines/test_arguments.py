"""Tests which arguments of engines are refused, and that each refusal says why."""

from pathlib import Path

import pytest

from protocol.errors import SettingsError
from rollout.engines.arguments import check_arguments, check_known
from rollout.engines.base import EngineConfig
from services.settings.load import dump_settings, load_settings


def test_arguments_that_change_no_version_and_no_probability_pass() -> None:
    config = EngineConfig(name="vllm", arguments={"enable_expert_parallel": True, "block_size": 32})
    check_arguments(config, "engine.arguments")
    check_known(config, "engine.arguments")


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        (
            "sglang",
            {"modelopt_quant": "fp8"},
            r"engine\.arguments\.modelopt_quant: refused, because versions",
        ),
        ("vllm", {"data_parallel_size": 2}, r"data_parallel_size: .*start one rollout worker for each"),
        ("vllm", {"max_model_len": 8}, r"max_model_len: refused, because set engine\.max_model_len"),
        ("sglang", {"speculative_algorithm": "EAGLE"}, r"speculative_algorithm: .*one token a step"),
        ("hf", {"block_size": 32}, r"engine\.arguments: engine 'hf' takes no arguments; .*sglang or vllm"),
    ],
)
def test_refused_argument_is_named_with_the_reason(
    name: str, arguments: dict[str, object], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        check_arguments(EngineConfig(name=name, arguments=arguments), "engine.arguments")


def test_unknown_argument_is_named_with_the_nearest_one() -> None:
    config = EngineConfig(name="vllm", arguments={"moe-backend": "triton"})
    with pytest.raises(SettingsError, match=r"argument of vllm 'moe-backend' is not known; .*'moe_backend'"):
        check_known(config, "engine.arguments")


def test_settings_refuse_an_argument_before_anything_starts() -> None:
    with pytest.raises(SettingsError, match=r"setting engine\.arguments\.seed: refused"):
        load_settings(overrides=["engine.name=vllm", "engine.arguments.seed=7"], environ={})


def test_entry_of_a_pool_has_arguments_of_its_own(tmp_path: Path) -> None:
    pool = "services.pool=[{ engine = { name = 'vllm', arguments = { block_size = 32 } } }]"
    settings = load_settings(overrides=[pool], environ={})
    dump_settings(settings, tmp_path / "settings.json")
    with pytest.raises(SettingsError, match=r"services\.pool\.0\.engine\.arguments\.seed: refused"):
        load_settings(overrides=[pool.replace("block_size", "seed")], environ={})
    inherited = ["engine.arguments={ block_size = 32 }", "services.pool=[{ engine = { name = 'hf' } }]"]
    with pytest.raises(SettingsError, match=r"pool\.0\.engine\.arguments: engine 'hf' takes no arguments"):
        load_settings(overrides=inherited, environ={})

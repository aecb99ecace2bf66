"""Tests the command, environment and port of SGLang's server, and refusals before it starts."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from protocol.errors import EngineError, EngineSettingsError
from rollout.engines.base import EngineConfig
from rollout.engines.contract.models import tiny_model
from rollout.engines.registry import make_engine
from rollout.engines.sglang.launch import (
    HIGHEST_PORT,
    OTHER_LOGPROBS,
    check_model,
    free_port,
    kv_tokens,
    server_command,
    server_environment,
)
from tests.changes import SGLANG, slow_unless_changed
from tests.contracts.sglang_environment import sglang_settings


def test_command_contains_the_settings(tmp_path: Path) -> None:
    tiny_model(1).save_pretrained(tmp_path)
    config = EngineConfig(
        name="sglang",
        python="/x/python",
        dtype="bfloat16",
        max_model_len=256,
        max_running=3,
        tensor_parallel_size=2,
    )
    command = server_command(config, tmp_path, "rollout.0.a", 4000)
    assert command[:3] == ["/x/python", "-m", "sglang.launch_server"]
    assert {
        "--dtype=bfloat16",
        "--tp-size=2",
        "--max-running-requests=3",
        "--load-format=auto",
        "--port=4000",
    } <= set(command)
    assert command != server_command(config, tmp_path, "rollout.1.a", 4000)  # another seed


def test_server_environment_has_the_given_variables_and_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TETHER_REDIS_URL", "redis://secret")
    monkeypatch.setenv("PYTHONPATH", "/inherited")
    config = EngineConfig(name="sglang", environment={"PYTHONPATH": "/given", "OMP_NUM_THREADS": "3"})
    environment = server_environment(config, tmp_path)
    assert "redis://secret" not in environment.values()
    assert environment["PYTHONPATH"].split(os.pathsep) == [
        str(tmp_path),
        str(Path(__file__).parents[4]),
        "/given",
        "/inherited",
    ]
    assert environment["OMP_NUM_THREADS"] == "3"


def test_sampling_is_not_changed_behind_the_trainers_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(1).save_pretrained(tmp_path)
    config = EngineConfig(name="sglang")
    assert "--sampling-defaults=openai" in server_command(config, tmp_path, "rollout.0.a", 4000)
    monkeypatch.setenv(OTHER_LOGPROBS, "1")
    assert OTHER_LOGPROBS not in server_environment(config, tmp_path)
    with pytest.raises(EngineSettingsError, match=rf"engine\.environment: with {OTHER_LOGPROBS}"):
        check_model(replace(config, environment={OTHER_LOGPROBS: "1"}, dtype="bfloat16"), tmp_path)


def test_free_port_is_one_that_every_version_accepts() -> None:
    assert max(free_port() for _ in range(100)) <= HIGHEST_PORT


def test_cache_that_cannot_hold_one_request_is_refused() -> None:
    model = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "num_hidden_layers": 2}
    assert kv_tokens(EngineConfig(kv_cache_mb=4), model) == 4096
    with pytest.raises(EngineSettingsError, match="kv_cache_mb 1 holds 1024 tokens"):
        kv_tokens(EngineConfig(kv_cache_mb=1, max_model_len=1024), model)


@pytest.mark.parametrize(
    ("python", "words"),
    [("", "No module named 'sglang'"), ("/nowhere/python", r"engine\.python: /nowhere/python")],
)
def test_interpreter_without_sglang_is_named(tmp_path: Path, python: str, words: str) -> None:
    tiny_model(1).save_pretrained(tmp_path)
    engine = make_engine(EngineConfig(name="sglang", python=python), tmp_path, "sglang.test")
    with pytest.raises(EngineError, match=words):
        uvloop.run(engine.start())  # the event loop of the services


@slow_unless_changed(*SGLANG)
def test_arguments_that_sglang_refuses_are_no_reason_to_try_again(tmp_path: Path) -> None:
    tiny_model(1).save_pretrained(tmp_path)
    config = EngineConfig(name="sglang", dtype="float64", max_model_len=64, **sglang_settings())
    engine = make_engine(config, tmp_path, "sglang.test")
    with pytest.raises(EngineSettingsError, match=r"ended with code 2: .*--dtype: invalid choice: 'float64'"):
        uvloop.run(engine.start())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "ignores attn_logit_softcapping of"),
        ({"model_type": "ministral", "sliding_window": 8}, "exceeds the sliding window of 8 tokens"),
    ],
)
def test_a_model_that_sglang_would_compute_otherwise_is_refused(
    tmp_path: Path, model: dict[str, object], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    with pytest.raises(EngineSettingsError, match=words):
        check_model(EngineConfig(name="sglang", max_model_len=64), tmp_path)

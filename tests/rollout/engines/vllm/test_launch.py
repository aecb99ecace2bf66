"""Tests which models are refused before vLLM starts."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from protocol.errors import EngineSettingsError
from protocol.weights.lora import NO_ADAPTERS
from rollout.engines.base import EngineConfig, Sampling
from rollout.engines.contract.models import tiny_model
from rollout.engines.vllm import launch as launching
from rollout.engines.vllm.imports import set_environment
from rollout.engines.vllm.launch import (
    VllmProcesses,
    check_model,
    engine_arguments,
    launch,
    sampling_parameters,
)

pytestmark = pytest.mark.xdist_group("vllm-recompute")  # the process in which the contract imports vLLM


def test_sampling_is_not_changed_behind_the_trainers_back(tmp_path: Path) -> None:
    from vllm import SamplingParams  # seconds of each process that collects this file

    tiny_model(1).save_pretrained(tmp_path)
    arguments = engine_arguments(EngineConfig(), tmp_path, "rollout.0.a", NO_ADAPTERS)
    assert arguments["generation_config"] == "vllm"
    assert not {"override_generation_config", "logits_processors"} & arguments.keys()
    found, plain = sampling_parameters(Sampling(4, temperature=0.7)), SamplingParams()
    for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"):
        assert getattr(found, name) == getattr(plain, name)
    assert (found.bad_words or [], found.allowed_token_ids, found.min_tokens) == ([], None, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a limit of vLLM on a CPU")
@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        ({"num_attention_heads": 8, "hidden_size": 128}, EngineConfig(), "head_dim 16 is not supported"),
        ({"max_position_embeddings": 100}, EngineConfig(max_model_len=200), "exceeds the 100 positions"),
        ({}, EngineConfig(enable_return_routed_experts=True), "vLLM records experts on a GPU only"),
        ({}, EngineConfig(tensor_parallel_size=3), "tensor_parallel_size 3 does not divide the 4 heads"),
    ],
)
def test_model_that_vllm_cannot_run_is_refused(
    tmp_path: Path, change: dict[str, int], config: EngineConfig, words: str
) -> None:
    tiny_model(1).config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(EngineSettingsError, match=words):
        check_model(config, tmp_path)


def test_arguments_that_vllm_refuses_are_no_reason_to_try_again(tmp_path: Path) -> None:
    """Its engine process refuses others: `tests/integration/test_ends.py`."""
    tiny_model(1).save_pretrained(tmp_path)
    config = EngineConfig(max_model_len=64)
    set_environment(config)
    arguments = engine_arguments(config, tmp_path, "rollout.0.a", NO_ADAPTERS)
    with pytest.raises(EngineSettingsError, match=r"vLLM cannot serve .*float3") as refused:
        launch({**arguments, "dtype": "float3"})
    assert "\n" not in str(refused.value)


async def test_questions_to_the_engine_process_wait_as_long_as_the_commit_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launching, "CALL_TIMEOUT_S", 0.01)
    processes = VllmProcesses("e")
    processes.prepare(EngineConfig(enforce_eager=False, staging="layers", stage_timeout_s=60.0))
    core = SimpleNamespace(call_utility_async=lambda method, *arguments: asyncio.sleep(0.1, (1, None, None)))
    processes.llm = SimpleNamespace(engine_core=core)
    assert await processes.sampled("1") == (1, None, None)
    assert (await processes.occupancy()).running == 1

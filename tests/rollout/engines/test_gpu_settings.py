"""Tests what vLLM and SGLang are started with, or refused, only on a GPU; needs none and starts nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rollout.engines.sglang.launch as sglang_start
import rollout.engines.vllm.launch as vllm_start
from protocol.errors import EngineSettingsError
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from rollout.engines.base import EngineConfig
from rollout.engines.contract.models import tiny_model


@pytest.mark.parametrize(
    ("check", "lora"), [(vllm_start.check_model, LoraConfig(rank=4)), (sglang_start.check_model, NO_ADAPTERS)]
)
def test_float32_is_refused_where_the_kernels_lack_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[..., Any], lora: LoraConfig
) -> None:
    tiny_model(1).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check(EngineConfig(dtype="bfloat16"), tmp_path, lora)
    with pytest.raises(EngineSettingsError, match=r"setting engine\.dtype: .*not in float32"):
        check(EngineConfig(), tmp_path, lora)
    monkeypatch.undo()
    check(EngineConfig(), tmp_path, lora)


def test_attention_backend_is_passed_to_both_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(1).save_pretrained(tmp_path)
    config = EngineConfig(attention_backend="TRITON")

    def named() -> tuple[bool, bool]:
        vllm = vllm_start.engine_arguments(config, tmp_path, "e", NO_ADAPTERS)
        sglang = sglang_start.server_command(config, tmp_path, "e", 4000)
        return vllm.get("attention_backend") == "TRITON", "--attention-backend=TRITON" in sglang

    assert named() == (False, False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert named() == (True, True)


def test_graphs_are_captured_for_as_many_requests_as_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(1).save_pretrained(tmp_path)

    def captured(**settings: Any) -> tuple[int | None, str | None]:
        config = EngineConfig(**{"enforce_eager": False, **settings})
        vllm = vllm_start.engine_arguments(config, tmp_path, "e", NO_ADAPTERS)
        sglang = sglang_start.server_command(config, tmp_path, "e", 4000)
        words = [word for word in sglang if word.startswith("--cuda-graph-max-bs-decode=")]
        return vllm.get("max_cudagraph_capture_size"), next(iter(words), None)

    assert captured(max_running=1024) == (None, None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert captured(max_running=1024) == (1024, "--cuda-graph-max-bs-decode=1024")
    assert captured(max_running=512) == (None, "--cuda-graph-max-bs-decode=512")  # vLLM does so by itself
    assert captured(max_running=1024, enforce_eager=True) == (None, None)
    assert captured(max_running=1024, arguments={"compilation_config": {}})[0] is None

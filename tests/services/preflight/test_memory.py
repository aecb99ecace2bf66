"""Tests what is said of the trainer's memory before a start."""

from pathlib import Path
from typing import Any

import pytest

from services.preflight.memory import describe_memory, expected_gb, memory_text, workload_of
from services.preflight.model import ModelFacts
from services.settings.load import load_settings
from services.settings.sections import Settings
from trainer.megatron.memory.expected import GIB, expected_memory

QWEN = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
FACTS = ModelFacts(Path("model"), QWEN, None, is_made=True)


def settings(*overrides: str) -> Settings:
    return load_settings(None, ["trainer.dtype=bfloat16", *overrides], environ={"CUDA_VISIBLE_DEVICES": ""})


def test_a_budget_that_is_set_is_what_is_expected() -> None:
    given = settings("trainer.micro_batch_tokens=4096", "algorithm.kl_coef=0.1")
    memory = expected_memory(workload_of(given, FACTS), 4096)
    assert expected_gb(given, FACTS) == memory.peak / GIB
    text = memory_text(workload_of(given, FACTS))
    assert text == f"expected peak of a trainer rank at 4096 tokens a micro-batch: {memory}"


def test_a_budget_that_is_chosen_later_is_between_the_smallest_and_the_largest() -> None:
    work = workload_of(settings(), FACTS)
    assert expected_gb(settings(), FACTS) == expected_memory(work, 1024).peak / GIB
    most = expected_memory(work, 32768).peak / GIB
    assert f"at 1024 tokens a micro-batch, {most:.1f} GiB at 32768" in memory_text(work)


@pytest.mark.parametrize("overrides", [("trainer.backend=reference",), ("trainer.device=cpu",), ()])
def test_nothing_is_said_without_a_gpu_or_of_another_backend(overrides: tuple[str, ...]) -> None:
    environ: dict[str, Any] = {"CUDA_VISIBLE_DEVICES": "0" if overrides else "-1"}
    assert describe_memory(settings(*overrides), FACTS, environ) == []
    if "trainer.backend=reference" in overrides:
        assert expected_gb(settings(*overrides), FACTS) is None

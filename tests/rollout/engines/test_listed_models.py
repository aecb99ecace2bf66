"""Tests the lists of architectures, against the libraries' own answers where they are installed."""

from pathlib import Path

from rollout.engines.listed_models import engines_with, listed_architectures


def test_vllm_lists_what_its_registry_says() -> None:
    from vllm.model_executor.models.registry import (
        ModelRegistry,  # seconds of each process that collects this
    )

    found = listed_architectures("vllm")
    assert {"LlamaForCausalLM", "Qwen3NextForCausalLM", "Gemma3ForConditionalGeneration"} <= found
    assert found <= ModelRegistry.get_supported_archs()
    assert "BertModel" in ModelRegistry.get_supported_archs() - found  # it generates no text


def test_sglang_lists_its_classes(tmp_path: Path) -> None:
    models = tmp_path / "srt/models"
    models.mkdir(parents=True)
    (models / "one.py").write_text("class A: ...\nEntryClass = A\n")
    (models / "two.py").write_text("EntryClass = [\n    B,  # not C\n    D,\n]\n")
    (models / "three.py").write_text("EntryClass: list[type] = [E, F]\n")
    assert listed_architectures("sglang", tmp_path) == {"A", "B", "D", "E", "F"}
    assert listed_architectures("sglang", tmp_path / "absent") == frozenset()


def test_an_engine_that_is_not_installed_says_nothing() -> None:
    assert engines_with({"architectures": ["LlamaForCausalLM"]}) == {"vllm": True}
    assert engines_with({"architectures": ["FuyuForNobody"]}) == {"vllm": False}
    assert engines_with({}) == {"vllm": False}

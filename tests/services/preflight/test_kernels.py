"""Tests what is found of the kernels of vLLM and SGLang before they start, and the lists that it rests on."""

from pathlib import Path
from typing import get_args

import pytest

from services.preflight.kernels import CPU_HEAD_SIZES, RANKS, kernel_problems, numbers_in_vllm
from services.preflight.model import read_model
from tests.services.preflight.test_check import demo, found, model_in, with_model


@pytest.mark.parametrize(
    ("overrides", "gpus", "words"),
    [
        (["lora.rank=512"], [], None),
        (["lora.rank=513"], [], "setting lora.rank = 513: vLLM has kernels for adapters of rank 512 at most"),
        (["lora.rank=513", "engine.name=hf"], [], None),
        (["lora.rank=8"], [], None),
        (["lora.rank=8"], ["0"], "setting engine.dtype = 'float32': vLLM's adapter kernels"),
        (["lora.rank=8", "engine.dtype=bfloat16"], ["0"], None),
        (["engine.dtype=float32"], ["0"], None),
        (["engine.name=sglang"], ["0"], "setting engine.dtype = 'float32': SGLang's kernels"),
        (["engine.name=sglang"], [], None),
    ],
)
def test_kernels_that_are_not_there_are_named(
    tmp_path: Path, overrides: list[str], gpus: list[str], words: str | None
) -> None:
    settings = demo(tmp_path / "run", *overrides)
    problems = [str(problem) for problem in kernel_problems(settings, read_model(settings), gpus)]
    assert problems == [] if words is None else len(problems) == 1 and words in problems[0], problems


def test_a_head_size_that_vllm_lacks_on_a_cpu_is_refused(tmp_path: Path) -> None:
    model = model_in(tmp_path / "model", head_dim=8)
    vllm, hf = (with_model(tmp_path / "run", model, f"engine.name={name}") for name in ("vllm", "hf"))
    facts = read_model(vllm)
    (problem,) = kernel_problems(vllm, facts, [])
    assert "setting engine.name = 'vllm'" in str(problem)
    assert "head_dim 8 is not supported by vLLM on a CPU" in str(problem)
    assert str(problem) in found(vllm, local=True)
    assert list(kernel_problems(vllm, facts, ["0"])) == list(kernel_problems(hf, facts, [])) == []


@pytest.mark.engine
def test_lists_in_the_source_of_vllm_are_the_ones_that_it_has() -> None:
    from vllm.config.lora import MaxLoRARanks

    from rollout.engines.vllm.imports import cpu_head_sizes

    assert numbers_in_vllm(*RANKS) == list(get_args(MaxLoRARanks))
    assert numbers_in_vllm(*CPU_HEAD_SIZES) == cpu_head_sizes()

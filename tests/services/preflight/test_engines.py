"""Tests what is found of engines and a model before a run starts."""

from pathlib import Path
from typing import get_args

import pytest

from protocol.errors import SettingsError
from services.preflight.engines import CPU_HEAD_SIZES, RANKS, kernel_problems, numbers_in_vllm
from services.preflight.model import read_model
from tests.contracts.engine_draft_models import tiny_shallow, write_eagle
from tests.services.preflight.test_check import demo, found, model_in, with_model

MOE = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "head_dim": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
}  # fmt: skip


def test_an_engine_on_one_rank_refuses_tensor_parallelism(tmp_path: Path) -> None:
    two = "engine.tensor_parallel_size=2"
    problems = found(demo(tmp_path / "run", "engine.name=hf", two))
    assert "setting engine.tensor_parallel_size = 2: engine 'hf' computes on one rank" in problems[0]
    assert found(demo(tmp_path / "run", "engine.name=megatron", two)) == []
    mixture = with_model(tmp_path / "run", model_in(tmp_path / "model", **MOE), "engine.name=megatron", two)
    assert not any("on one rank" in text for text in found(mixture))


def test_sglang_refuses_layers_without_experts(tmp_path: Path) -> None:
    model = model_in(tmp_path / "model", **MOE, mlp_only_layers=[0])
    problems = found(with_model(tmp_path / "run", model, "engine.name=sglang"))
    assert any("layers without experts (mlp_only_layers = [0])" in text for text in problems), problems
    assert not any(
        "mlp_only" in text for text in found(with_model(tmp_path / "run", model, "engine.name=hf"))
    )


def test_sglang_computes_gpt_oss_in_the_type_of_its_config(tmp_path: Path) -> None:
    model = model_in(tmp_path / "model", model_type="gpt_oss", dtype="float32")
    sglang = ("engine.name=sglang", "engine.dtype=bfloat16")
    (text,) = [one for one in found(with_model(tmp_path / "run", model, *sglang)) if "gpt_oss in" in one]
    assert "setting engine.dtype = 'bfloat16'" in text
    assert text.endswith("the type that it states, float32; set it to float32, or state bfloat16 there")
    alike = with_model(tmp_path / "run", model, "engine.name=sglang", "engine.dtype=float32")
    assert not any("gpt_oss in" in one for one in found(alike))


def test_routing_replay_needs_experts(tmp_path: Path) -> None:
    dense = found(demo(tmp_path / "run", "engine.name=hf", "trainer.routing_replay=true"))
    assert any("setting trainer.routing_replay = True: the model in" in text for text in dense), dense
    model = model_in(tmp_path / "model", **MOE)
    mixture = with_model(tmp_path / "run", model, "engine.name=hf", "trainer.routing_replay=true")
    assert not any("no experts whose choice" in text for text in found(mixture))


def test_a_model_that_drafts_nothing_for_the_target_is_found_before_a_start(tmp_path: Path) -> None:
    model, drafts = model_in(tmp_path / "model"), ("engine.name=vllm", "engine.drafts=model")
    (further,) = [text for text in found(with_model(tmp_path / "run", model, *drafts)) if "drafts" in text]
    assert "setting engine.drafts: " in further
    assert "has no layers that predict further tokens (MTP)" in further
    target = tiny_shallow(1)
    head = f'engine.draft_model="{write_eagle(target, tmp_path)}"'
    (other,) = [text for text in found(with_model(tmp_path / "run", model, *drafts, head)) if "draft" in text]
    assert "setting engine.draft_model: " in other
    assert f"its vocabulary has {target.config.vocab_size} tokens" in other
    adapters = found(with_model(tmp_path / "run", model, *drafts, head, "lora.rank=8"))
    assert any("setting engine.drafts: 'model'" in text and "lora.rank" in text for text in adapters)


def test_every_engine_of_a_pool_has_to_serve_adapters(tmp_path: Path) -> None:
    pool = "services.pool=[{count=1}, {count=1, engine={name='scripted'}}]"
    with pytest.raises(SettingsError, match=r"setting lora\.rank: engine 'scripted' does not serve adapters"):
        demo(tmp_path / "run", pool, "lora.rank=8")


def test_sglang_jax_refuses_other_families_and_interpreters_that_lack_it(tmp_path: Path) -> None:
    model = model_in(tmp_path / "model", **MOE)
    problems = found(with_model(tmp_path / "run", model, "engine.name=sglang_jax"))
    assert any("serves qwen2 and qwen3" in text and "qwen3_moe" in text for text in problems), problems
    assert any("setting engine.python" in text and "sglang-jax.txt" in text for text in problems), problems


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
        (
            ["engine.name=sglang", "engine.environment={SGLANG_RETURN_ORIGINAL_LOGPROB='1'}"],
            [],
            "setting engine.environment: with SGLANG_RETURN_ORIGINAL_LOGPROB SGLang returns",
        ),
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


def test_bounded_scores_that_sglang_ignores_on_a_cpu_are_refused(tmp_path: Path) -> None:
    model = model_in(tmp_path / "model", attn_logit_softcapping=50.0)
    sglang = with_model(tmp_path / "run", model, "engine.name=sglang")
    (problem,) = kernel_problems(sglang, read_model(sglang), [])
    assert "'sglang' ignores attn_logit_softcapping" in str(problem)
    assert "bound scores" not in " ".join(map(str, kernel_problems(sglang, read_model(sglang), ["0"])))


@pytest.mark.engine
def test_lists_in_the_source_of_vllm_are_the_ones_that_it_has() -> None:
    from vllm.config.lora import MaxLoRARanks

    from rollout.engines.vllm.imports import cpu_head_sizes

    assert numbers_in_vllm(*RANKS) == list(get_args(MaxLoRARanks))
    assert numbers_in_vllm(*CPU_HEAD_SIZES) == cpu_head_sizes()

"""Tests which adapters and arguments of engines are refused before anything starts."""

from pathlib import Path

import pytest
import torch

from protocol.weights.lora import LoraConfig, adapter_shapes, adapter_targets
from services.preflight.model import (
    adapter_problems,
    describe_adapters,
    model_problems,
    read_facts,
    read_model,
    tensor_shapes,
)
from tests.services.preflight.test_check import demo, found, model_in, with_model
from tests.trainer.megatron.models import save_model
from trainer.config import ScratchConfig
from trainer.lora import save_adapter
from trainer.random_model import build_scratch

BACKEND = ('trainer.backend="reference"', 'engine.name="hf"')


def test_adapter_to_start_from_is_checked_before_the_start(tmp_path: Path) -> None:
    model = build_scratch(ScratchConfig(vocabulary="0123456789= "), tmp_path / "model")
    lora = LoraConfig(rank=2)
    targets = adapter_targets(tensor_shapes(model), lora)
    tensors = {name: torch.zeros(shape) for name, shape in adapter_shapes(targets, 2).items()}
    save_adapter(tensors.items(), tmp_path / "given", lora, model)
    path = f'lora.path="{tmp_path / "given"}"'

    def problems(*overrides: str) -> list[str]:
        settings = with_model(tmp_path / "run", f'model={{path="{model}"}}', *BACKEND, *overrides)
        return [problem for problem in found(settings) if "lora" in problem]

    assert problems("lora.rank=2", path) == []
    assert problems("lora.rank=2") == []
    (other,) = problems("lora.rank=4", path)
    assert "r is 2; set lora.rank to it, which is 4" in other
    (without,) = problems(path)
    assert "setting lora.path" in without
    assert "lora.rank is 0; set lora.rank" in without
    (unknown,) = problems("lora.rank=2", 'lora.target_modules=["qproj"]')
    assert "the model has no linear layer qproj" in unknown


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe"])
def test_random_model_is_known_before_it_is_made(tmp_path: Path, architecture: str) -> None:
    lora = ("lora.rank=2", f"model.scratch.architecture={architecture}", *BACKEND)
    settings = demo(tmp_path / "run", *lora)
    facts = read_model(settings)
    assert not facts.is_made
    assert settings.model.scratch is not None
    made = read_facts(build_scratch(settings.model.scratch, tmp_path / "model"))
    assert facts.shapes == made.shapes
    assert describe_adapters(settings, facts).startswith("; adapters of rank 2 on ")
    (unknown,) = found(demo(tmp_path / "run", *lora, 'lora.target_modules=["qproj"]'))
    assert "the model has no linear layer qproj" in unknown
    if architecture == "qwen3_moe":
        (expert,) = found(demo(tmp_path / "run", *lora, 'lora.target_modules=["up_proj"]'))
        assert "is an expert's or a router's, which cannot have adapters" in expert


@pytest.mark.parametrize(
    ("name", "layer", "backend", "words"),
    [
        ("qwen3-moe", "gate_proj", "megatron", "is an expert's, and experts cannot have adapters"),
        ("qwen3-moe", "gate", "megatron", "mlp.gate.weight cannot have an adapter in the megatron backend"),
        ("phi3", "qkv_proj", "megatron", "qkv_proj.weight cannot have an adapter in the megatron backend"),
        ("qwen2", "lm_head", "megatron", "lm_head.weight cannot have an adapter in the megatron backend"),
        ("qwen3-moe", "down_proj", "reference", "is an expert's or a router's, which cannot have adapters"),
        ("qwen3-moe", "gate", "reference", "is an expert's or a router's, which cannot have adapters"),
        ("qwen3-moe", "q_proj", "reference", ""),
        ("phi3", "qkv_proj", "reference", ""),
    ],
)
def test_layers_that_a_trainer_cannot_adapt_are_refused(
    tmp_path: Path, name: str, layer: str, backend: str, words: str
) -> None:
    model = save_model(name, tmp_path / "model")
    words_of_lora = ("lora.rank=2", f'lora.target_modules=["{layer}"]', f'trainer.backend="{backend}"')
    settings = with_model(tmp_path / "run", f'model={{path="{model}"}}', 'engine.name="hf"', *words_of_lora)
    problems = [problem for problem in found(settings) if "lora" in problem]
    assert [words in problem for problem in problems] == [True] * bool(words), problems
    if not words:
        assert describe_adapters(settings, read_facts(model)) == f"; adapters of rank 2 on {layer}"


def test_arguments_that_no_engine_has_are_found_for_each_engine(tmp_path: Path) -> None:
    def problems(*overrides: str) -> list[str]:
        return [problem for problem in found(demo(tmp_path / "run", *overrides)) if "block_s" in problem]

    wrong = 'engine={ name = "vllm", max_model_len = 64, arguments = { block_sze = 16 } }'
    assert problems('engine.name="vllm"', "engine.arguments={ block_size = 16 }") == []
    for override in (wrong, f"services.pool=[{{ {wrong} }}]"):
        (problem,) = problems(override)
        assert "argument of vllm 'block_sze' is not known; did you mean 'block_size'?" in problem
    assert len(problems("eval.every=1", f"eval.{wrong}")) == 1


@pytest.mark.parametrize(
    ("name", "engine", "words"),
    [
        ("deepseek-v3", "megatron", "biases of the routers of deepseek_v3 have none; use shm"),
        ("gpt-oss", "megatron", "gpt_oss has the experts' matrices transposed; use shm"),
        (
            "deepseek-v2",
            "vllm",
            "vLLM computes the latent attention of deepseek_v2 with tensors that it makes after loading",
        ),
        (
            "qwen2",
            "vllm",
            "model.layers.0.self_attn.q_proj.weight is interleaved with other tensors in the trainer's "
            "decoder.layers.0.self_attention.linear_qkv.weight, and is not in engine 'vllm'",
        ),
    ],
)
def test_masters_of_a_model_are_not_shared_where_the_engine_lacks_them(
    name: str, engine: str, words: str, tmp_path: Path
) -> None:
    model = save_model(name, tmp_path)
    shared = ("weights.transport=shared", f"engine.name={engine}")
    settings = with_model(tmp_path / "run", f'model={{path="{model}"}}', *shared)
    problems = [str(problem) for problem in model_problems(settings, read_facts(model))]
    assert any(words in problem for problem in problems)


def test_ranks_of_vllm_share_where_they_divide_heads_and_vocabulary_as_the_trainer(tmp_path: Path) -> None:
    model = save_model("qwen2", tmp_path)  # two key-value heads, 131 tokens
    ranks = ("parallel.tensor_model_parallel_size=2", "engine.tensor_parallel_size=2")
    shared = (f'model={{path="{model}"}}', "weights.transport=shared", "engine.name=vllm", *ranks)
    found = [
        str(problem) for problem in model_problems(with_model(tmp_path / "run", *shared), read_facts(model))
    ]
    (problem,) = [text for text in found if "weights.transport" in text]
    assert "vLLM pads a vocabulary of 131 tokens to a multiple of 64 before it divides it" in problem


@pytest.mark.parametrize(
    ("name", "engine"), [("qwen2", "megatron"), ("qwen2-tied", "vllm"), ("deepseek-v2", "megatron")]
)
def test_masters_are_shared_where_trainer_and_engine_lay_out_alike(
    name: str, engine: str, tmp_path: Path
) -> None:
    model = save_model(name, tmp_path)
    shared = ("weights.transport=shared", f"engine.name={engine}", "engine.max_model_len=16")
    settings = with_model(tmp_path / "run", f'model={{path="{model}"}}', *shared)
    assert not any("weights.transport" in str(found) for found in model_problems(settings, read_facts(model)))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("engine.name=megatron",), "engine megatron has no cache for the states of gated delta nets"),
        (("parallel.context_parallel_size=2",), "context_parallel_size = 2 is not supported in qwen3_5_text"),
    ],
)
def test_layouts_and_engines_that_a_state_rules_out_are_found(
    overrides: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    model = save_model("qwen3.5", tmp_path)
    settings = with_model(tmp_path / "run", f'model={{path="{model}"}}', *overrides)
    problems = [str(problem) for problem in model_problems(settings, read_facts(model))]
    assert any(words in problem for problem in problems)


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("qwen2", (), ""),
        ("qwen2", ("trainer.compile=true",), "ranks of trainer.backend 'fsdp' are not compiled"),
        ("qwen2", ("trainer.fp8=rowwise", "trainer.dtype=bfloat16"), "are not in FP8 (trainer.fp8)"),
        ("qwen2", ("lora.rank=2",), ""),
        (
            "qwen2",
            ("parallel.pipeline_model_parallel_size=2",),
            "supports only data- and tensor-parallel ranks",
        ),
        ("qwen2-tied", (), "it does not divide the model's num_key_value_heads 1"),
        ("gpt-oss", (), "transformers has no tensor-parallel plan for model_type 'gpt_oss'"),
    ],
)
def test_layers_that_tensor_parallel_ranks_cannot_divide_are_found(
    name: str, overrides: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    model = save_model(name, tmp_path)
    given = ("trainer.backend=fsdp", "parallel.tensor_model_parallel_size=2", *overrides)
    settings = with_model(tmp_path / "run", f'model={{path="{model}"}}', *given)
    problems = [str(problem) for problem in model_problems(settings, read_facts(model))]
    assert [words in problem for problem in problems if "parallel" in problem] == [True] * bool(words)


@pytest.mark.parametrize(
    ("backend", "file", "words"),
    [
        ("fsdp", "training_args.bin", "holds no *.safetensors or pytorch_model*.bin"),
        ("reference", "training_args.bin", "holds no *.safetensors or pytorch_model*.bin"),
        ("reference", "pytorch_model-00001-of-00002.bin", ""),
        ("megatron", "pytorch_model.bin", "holds no *.safetensors"),
    ],
)
def test_a_model_without_the_weights_that_the_trainer_reads_is_found(
    backend: str, file: str, words: str, tmp_path: Path
) -> None:
    override = model_in(tmp_path / "model")
    (tmp_path / "model/model.safetensors").rename(tmp_path / "model" / file)
    settings = with_model(tmp_path / "run", override, f"trainer.backend={backend}")
    problems = [str(problem) for problem in model_problems(settings, read_facts(tmp_path / "model"))]
    named = [problem for problem in problems if "trainer needs weights" in problem]
    assert [problem.endswith(words) for problem in named] == [True] * bool(words)


@pytest.mark.parametrize("layer", ["kv_a_proj_with_mqa", "kv_b_proj"])
def test_an_adapter_that_tensor_parallel_ranks_do_not_have_is_found(layer: str, tmp_path: Path) -> None:
    model = save_model("deepseek-v2", tmp_path)
    given = ("trainer.backend=fsdp", "engine.name=hf", "lora.rank=2", f'lora.target_modules=["{layer}"]')
    for ranks in (1, 2):
        sizes = f"parallel.tensor_model_parallel_size={ranks}"
        settings = with_model(tmp_path / f"run-{ranks}", f'model={{path="{model}"}}', sizes, *given)
        problems = [str(problem) for problem in adapter_problems(settings, read_facts(model))]
        wrong = [f"have no adapter on model.layers.0.self_attn.{layer}" in problem for problem in problems]
        assert wrong == [True] * (ranks == 2 and layer == "kv_a_proj_with_mqa"), problems

"""Tests that every layout starts from the source's bits, trains as plain torch does, and restores exactly."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.trainer.megatron.launch import launch
from tests.trainer.megatron.models import (
    ALL_MODELS,
    EXPERTS,
    PlainTrainer,
    make_batch,
    make_model,
    plain_logprobs,
    save_model,
    step_batch,
    tensors_of,
)
from tests.trainer.megatron.ranks import ALGORITHM, LAYOUTS, STEPS, models_of, one_of, run
from trainer.config import ParallelConfig

pytestmark = pytest.mark.xdist_group("layouts")  # what the module sets up once, not one for each process


def marks_of(layout: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if LAYOUTS[layout].world_size > 2 else []


EACH_LAYOUT = pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=marks_of(layout)) for layout in LAYOUTS]
)
EACH_LAYOUT_AND_MODEL = pytest.mark.parametrize(
    ("layout", "model"),
    [
        pytest.param(layout, model, marks=marks_of(layout))
        for layout in LAYOUTS
        for model in models_of(layout)
    ],
)


class Runs:
    """Results by layout, each launched once, when first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.models = root / "models"
        for name in ALL_MODELS:
            save_model(name, self.models)
        self._started: set[str] = set()
        self._plain: dict[str, tuple[list[dict[str, float]], dict[str, torch.Tensor]]] = {}

    def __call__(self, layout: str) -> Path:
        if layout not in self._started:
            # Also when it fails: its other tests then fail on what is missing, instead of waiting once more.
            self._started.add(layout)
            if LAYOUTS[layout].world_size == 1:
                run(layout, self.models, self.root / layout)
            else:
                self("single")
                arguments = (layout, str(self.models), str(self.root / layout))
                launch(
                    LAYOUTS[layout].world_size,
                    "tests.trainer.megatron.ranks",
                    *arguments,
                    logs=self.root / f"logs-{layout}",
                )
        return self.root / layout

    def plain(self, model: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        """Statistics of each step and the weights after the last, from plain torch."""
        if model not in self._plain:
            trainer = PlainTrainer(model, ALGORITHM)
            stats = [trainer.step(step_batch(model, step)) for step in range(STEPS)]
            self._plain[model] = stats, trainer.weights()
        return self._plain[model]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    torch.set_num_threads(1)
    return Runs(tmp_path_factory.mktemp("layouts"))


def same_bits(left: Path, right: Path) -> bool:
    a, b = load_file(left), load_file(right)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@EACH_LAYOUT_AND_MODEL
def test_export_before_training_is_the_source(runs: Runs, layout: str, model: str) -> None:
    exported = load_file(runs(layout) / model / "before.safetensors")
    source = tensors_of(make_model(model))
    assert exported.keys() == source.keys()
    assert [name for name in source if not torch.equal(exported[name], source[name])] == []


@EACH_LAYOUT_AND_MODEL
def test_logprobs_equal_hugging_face(runs: Runs, layout: str, model: str) -> None:
    of_ranks = load_file(runs(layout) / model / "logprobs.safetensors")["first"]
    logprobs = of_ranks.amin(0)  # 0 on the ranks of other replicas
    assert all(((row == logprobs) | (row == 0)).all() for row in of_ranks)
    assert (
        (of_ranks != 0).sum(0) == len(of_ranks) // LAYOUTS[layout].data_parallel_size * (logprobs != 0)
    ).all()
    batch = make_batch(model, 0)
    with torch.no_grad():
        expected, _ = plain_logprobs(make_model(model), batch)
    torch.testing.assert_close(logprobs, expected * batch.sampled_mask, atol=2e-6, rtol=0)


@EACH_LAYOUT_AND_MODEL
def test_training_equals_plain_torch(runs: Runs, layout: str, model: str) -> None:
    directory = runs(layout) / model
    expected_stats, expected = runs.plain(model)
    for stats, wanted in zip(json.loads((directory / "stats.json").read_text()), expected_stats, strict=True):
        assert stats.pop("skipped") == ""
        assert 1 <= stats.pop("micro_batches") <= 13
        assert 0 <= stats.pop("padding_share") < 0.25  # a replica without a sample has a token for each rank
        assert stats == pytest.approx(wanted, rel=5e-5, abs=2e-5)  # rel: a gradient norm of 20 in float32
    trained = load_file(directory / "after.safetensors")
    worst = max((trained[name] - expected[name]).abs().max().item() for name in expected)
    assert worst < 1e-5


@EACH_LAYOUT_AND_MODEL
def test_continuing_from_a_checkpoint_is_bit_identical(runs: Runs, layout: str, model: str) -> None:
    directory = runs(layout) / model
    assert same_bits(directory / "after.safetensors", directory / "restored.safetensors")


@EACH_LAYOUT_AND_MODEL
def test_export_is_what_the_ranks_hold(runs: Runs, layout: str, model: str) -> None:
    directory = runs(layout) / model
    exported = load_file(directory / "after.safetensors")
    held = gather_by_hand(directory / "at-end", layout, model)
    for name, tensor in held.items():
        assert torch.equal(exported[name], tensor), name
    assert held.keys() == exported.keys()


@EACH_LAYOUT_AND_MODEL
def test_reference_stays_while_the_model_moves(runs: Runs, layout: str, model: str) -> None:
    directory = runs(layout) / model
    kept = load_file(directory / "reference.safetensors")
    assert torch.equal(kept["first"], load_file(directory / "logprobs.safetensors")["first"])
    assert not torch.equal(kept["now"], kept["first"])


@EACH_LAYOUT_AND_MODEL
def test_saved_checkpoint_loads_in_transformers(runs: Runs, layout: str, model: str) -> None:
    directory = runs(layout) / model
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory / "hf")
    weights = tensors_of(loaded)
    exported = load_file(directory / "after.safetensors")
    assert weights.keys() == exported.keys()
    assert all(torch.equal(weights[name], exported[name]) for name in weights)


@EACH_LAYOUT
def test_bfloat16_trains_on_float32_masters(runs: Runs, layout: str) -> None:
    directory = runs(layout) / "bfloat16"
    before, after = load_file(directory / "before.safetensors"), load_file(directory / "after.safetensors")
    source = tensors_of(make_model(one_of(layout)))
    assert all(torch.equal(before[name], source[name].bfloat16()) for name in source)
    _, expected = runs.plain(one_of(layout))
    for name, tensor in after.items():
        assert tensor.dtype is torch.bfloat16
        torch.testing.assert_close(tensor.float(), expected[name], atol=5e-3, rtol=1e-2)
    assert same_bits(directory / "after.safetensors", directory / "restored.safetensors")
    files = [load_file(path) for path in (directory / "after-one").glob("optimizer-*.safetensors")]
    assert all(
        tensor.dtype is torch.float32
        for file in files
        for name, tensor in file.items()
        if name.endswith(".master")
    )


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2", "etp2"])
def test_checkpoint_of_another_layout_is_refused(runs: Runs, layout: str) -> None:
    refused = json.loads((runs(layout) / "refused.json").read_text())
    field = {
        "tp2": "tensor_model_parallel_size",
        "pp2": "pipeline_model_parallel_size",
        "dp2": "data_parallel_size",
        "etp2": "expert_tensor_parallel_size",
    }[layout]
    assert f"{field} is 1 in the checkpoint and 2 in the run" in refused["message"]
    assert refused["unchanged"]


def gather_by_hand(directory: Path, layout: str, model: str) -> dict[str, torch.Tensor]:
    """Hugging Face tensors from the ranks' files, without the rules: reshapes and concatenations only."""
    config = make_model(model).config
    parallel = LAYOUTS[layout]
    result = {}
    for stage in range(parallel.pipeline_model_parallel_size):
        files = files_of_stage(directory, parallel, stage)
        first = stage * config.num_hidden_layers // parallel.pipeline_model_parallel_size
        for name in files[0]:
            if ".experts." in name:
                parts = [file[name] for file in files]
            else:
                parts = [file[name] for file in files[: parallel.tensor_model_parallel_size]]
            if name.startswith("decoder.layers."):
                local, kind = name.removeprefix("decoder.layers.").split(".", 1)
                layer = f"model.layers.{int(local) + first}."
                by_hand = experts_by_hand if ".experts." in name else layer_by_hand
                found = by_hand(kind, parts, config, parallel)
                result.update({layer + key: value for key, value in found.items()})
            elif name.startswith("decoder.final_layernorm."):
                result["model.norm." + name.rpartition(".")[2]] = parts[0]
            else:
                tied = config.tie_word_embeddings or name.startswith("embedding")
                result["model.embed_tokens.weight" if tied else "lm_head.weight"] = torch.cat(parts)[
                    : config.vocab_size
                ]
    return result


def latent_by_hand(name: str, parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    split = {"linear_q_proj": "q_proj", "linear_q_up_proj": "q_b_proj", "linear_kv_up_proj": "kv_b_proj"}
    if name in split:
        return {f"self_attn.{split[name]}.weight": torch.cat(parts)}
    assert all(torch.equal(part, parts[0]) for part in parts)
    names = {
        "linear_q_down_proj": "q_a_proj",
        "q_layernorm": "q_a_layernorm",
        "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "kv_layernorm": "kv_a_layernorm",
    }
    return {f"self_attn.{names[name]}.weight": parts[0]}


def files_of_stage(directory: Path, parallel: ParallelConfig, stage: int) -> list[dict[str, torch.Tensor]]:
    """The parameters of the ranks of a stage; without experts, of its first replica."""
    if not (directory / "model-rank0.safetensors").exists():
        sizes = range(parallel.tensor_model_parallel_size)
        return [load_file(directory / f"model-tp{tp}-pp{stage}.safetensors") for tp in sizes]
    ranks = parallel.world_size // parallel.pipeline_model_parallel_size
    numbers = range(stage * ranks, (stage + 1) * ranks)
    return [load_file(directory / f"model-rank{rank}.safetensors") for rank in numbers]


def experts_by_hand(
    kind: str, parts: list[torch.Tensor], config: transformers.PretrainedConfig, parallel: ParallelConfig
) -> dict[str, torch.Tensor]:
    block, gate, up, down = EXPERTS[config.model_type]
    etp, ep = parallel.expert_tensor_parallel_size, parallel.expert_model_parallel_size
    for first in range(0, len(parts), ep * etp):
        assert all(torch.equal(a, b) for a, b in zip(parts[first:], parts[: ep * etp], strict=False))
    result, number = {}, 0
    for first in range(0, ep * etp, etp):
        for matrices in zip(*parts[first : first + etp], strict=True):
            here = f"{block}.experts.{number}."
            number += 1
            if kind.endswith("fc2"):
                result[f"{here}{down}.weight"] = torch.cat(matrices, 1)
                continue
            halves = zip(*(matrix.chunk(2) for matrix in matrices), strict=True)
            for part, half in zip((gate, up), halves, strict=True):
                result[f"{here}{part}.weight"] = torch.cat(half)
    assert number == config.num_local_experts
    return result


def layer_by_hand(
    kind: str, parts: list[torch.Tensor], config: transformers.PretrainedConfig, parallel: ParallelConfig
) -> dict[str, torch.Tensor]:
    suffix = kind.rsplit(".", 1)[1]
    if "linear_qkv" in kind:
        fused = torch.cat(parts)
        groups, queries = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
        pieces = fused.view(groups, queries + 2, config.head_dim, *fused.shape[1:]).split([queries, 1, 1], 1)
        split = [part.reshape(-1, *fused.shape[1:]) for part in pieces]
        if config.model_type == "phi3":
            return {"self_attn.qkv_proj.weight": torch.cat(split)}
        return {f"self_attn.{x}_proj.{suffix}": part for x, part in zip("qkv", split, strict=True)}
    if "shared.linear" in kind:
        plain = layer_by_hand(kind.replace("shared.", ""), parts, config, parallel)
        block = "shared_expert" if config.model_type == "qwen2_moe" else "shared_experts"
        return {name.replace("mlp.", f"mlp.{block}."): tensor for name, tensor in plain.items()}
    if "linear_fc1" in kind and config.model_type == "starcoder2":
        return {f"mlp.c_fc.{suffix}": torch.cat(parts)}
    if "linear_fc1" in kind:
        gate, up = (torch.cat(half) for half in zip(*(part.chunk(2) for part in parts), strict=True))
        if config.model_type in ("phi3", "glm", "glm4"):
            return {"mlp.gate_up_proj.weight": torch.cat([gate, up])}
        return {f"mlp.gate_proj.{suffix}": gate, f"mlp.up_proj.{suffix}": up}
    down = "mlp.c_proj" if config.model_type == "starcoder2" else "mlp.down_proj"
    columns = {"self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": down}
    layer = kind.rpartition(".")[0]
    if layer in columns:
        whole = torch.cat(parts, 1) if suffix == "weight" else parts[0]
        return {f"{columns[layer]}.{suffix}": whole}
    if config.model_type.startswith("deepseek") and "self_attention" in kind:
        return latent_by_hand(kind.split(".")[1], parts)
    if config.model_type == "olmo2" and "self_attention" in kind:
        return {f"self_attn.{kind[len('self_attention.')]}_norm.weight": torch.cat(parts)}
    names = {
        "input_layernorm": "input_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
        "self_attention.q_layernorm": "self_attn.q_norm",
        "self_attention.k_layernorm": "self_attn.k_norm",
    }
    if layer == "mlp.router":
        router = {"bias": "gate.e_score_correction_bias"}.get(suffix, f"gate.{suffix}")
        assert all(torch.equal(part, parts[0]) for part in parts)
        return {f"{EXPERTS[config.model_type][0]}.{router}": parts[0]}
    names["mlp.shared_gate"] = "mlp.shared_expert_gate"
    if config.model_type.startswith("gemma"):
        names["pre_mlp_layernorm"] = "pre_feedforward_layernorm"
    if config.model_type == "glm4":
        names["post_attention_layernorm"] = "post_self_attn_layernorm"
        names["post_mlp_layernorm"] = "post_mlp_layernorm"
    assert all(torch.equal(part, parts[0]) for part in parts)
    return {f"{names[layer]}.{suffix}": parts[0]}

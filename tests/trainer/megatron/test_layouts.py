"""Tests what only Megatron's layouts have; tests/trainer/backends/test_training.py has the rest."""

import json
import re
from collections.abc import Callable

import pytest
import torch
from _pytest.mark import ParameterSet
from safetensors.torch import load_file

from protocol.weights.lora import NO_ADAPTERS
from tests.trainer.megatron.by_hand import gather_by_hand, held_by
from tests.trainer.megatron.layout_runs import Runs, marks_of, same_bits
from tests.trainer.megatron.layouts import EXPERT_LAYOUTS, LAYOUTS, models_of, one_of, tied_model_of
from tests.trainer.megatron.models import (
    make_batch,
    make_model,
    plain_logprobs,
    plain_loss,
    tensors_of,
)
from tests.trainer.megatron.ranks import ALGORITHM, BY_SAMPLE, OVERFLOWS
from tests.trainer.megatron.routed import forced_logprobs, routed_batch
from trainer.config import ParallelConfig
from trainer.megatron.checkpoint.description import TrainedModel
from trainer.megatron.families.reading import read_architecture
from trainer.megatron.layout import Layout

pytestmark = pytest.mark.xdist_group("layouts")  # what `runs` sets up once, not one for each process


def of_layouts(wanted: Callable[[ParallelConfig], bool]) -> list[ParameterSet]:
    return [
        pytest.param(layout, marks=marks_of(layout)) for layout, sizes in LAYOUTS.items() if wanted(sizes)
    ]


def has_experts(sizes: ParallelConfig) -> bool:
    """Whether models with experts alone are trained in it."""
    return sizes in EXPERT_LAYOUTS.values()


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


def test_every_way_to_split_a_tensor_is_trained_in_a_layout_that_is_not_slow(runs: Runs) -> None:
    """The way: which parameter, and what rule cuts it along which dimension, in whole heads or not."""

    def ways(layout: str) -> set[tuple[object, ...]]:
        found: set[tuple[object, ...]] = set()
        for model in models_of(layout):
            architecture = read_architecture(runs.models / model)
            trained = TrainedModel(
                architecture,
                Layout.of(LAYOUTS[layout], architecture.layers),
                "float32",
                NO_ADAPTERS,
                distributed=False,
            )
            for rule in trained.rules(0):
                name = re.sub(r"\d+", "N", rule.parameter)
                found.add((name, type(rule), rule.dim, rule.expert, getattr(rule, "unit", 1) > 1))
        return found

    assert ways("tp2-sequence-more") <= ways("tp2-sequence")
    assert len(ways("tp2-sequence")) > 30


@EACH_LAYOUT_AND_MODEL
def test_export_is_what_the_ranks_hold(runs: Runs, layout: str, model: str) -> None:
    directory = runs(layout) / model
    exported = load_file(directory / "after.safetensors")
    held = gather_by_hand(directory / "held", layout, model)
    for name, tensor in held.items():
        assert torch.equal(exported[name], tensor), name
    assert held.keys() == exported.keys()


@EACH_LAYOUT
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_sixteen_bits_train_on_float32_masters(runs: Runs, layout: str, name: str) -> None:
    directory, dtype = runs(layout) / name, getattr(torch, name)
    before, after = load_file(directory / "before.safetensors"), load_file(directory / "after.safetensors")
    source = tensors_of(make_model(one_of(layout)))
    assert all(torch.equal(before[name], source[name].to(dtype)) for name in source)
    _, expected = runs.plain(one_of(layout))
    for name, tensor in after.items():
        assert tensor.dtype is dtype
        torch.testing.assert_close(tensor.float(), expected[name], atol=5e-3, rtol=1e-2)
    assert same_bits(directory / "after.safetensors", directory / "restored.safetensors")
    files = [load_file(path) for path in (directory / "after-one").glob("rank-*.safetensors")]
    assert {tensor.dtype for file in files for name, tensor in file.items() if "/" in name} == {torch.float32}
    scale, repeats = json.loads((directory / "scale.json").read_text())
    if dtype is torch.float16:
        assert (scale * 2**repeats, repeats > 0) == (OVERFLOWS, True)
        assert {tuple(file["loss_scale"].tolist()) for file in files} == {(scale, 1.0)}
    else:
        assert (scale, repeats) == (None, None)


@pytest.mark.parametrize("layout", of_layouts(lambda size: size.virtual_pipeline_model_parallel_size > 1))
def test_two_stages_take_no_activation_for_a_gradient(runs: Runs, layout: str) -> None:
    """The stage before and the one after are the same rank there."""
    received = json.loads((runs(layout) / "exchange.json").read_text())
    assert received == [[11], [21]]


@pytest.mark.parametrize(
    "layout", of_layouts(lambda size: size.pipeline_model_parallel_size > 1 and not has_experts(size))
)
def test_an_embedding_that_is_the_output_layer_stays_one_tensor_on_both_stages(
    runs: Runs, layout: str
) -> None:
    model = tied_model_of(layout)
    parallel = LAYOUTS[layout]
    source = make_model(model).get_input_embeddings().weight
    for tp in range(parallel.tensor_model_parallel_size):
        last = parallel.pipeline_model_parallel_size - 1
        held = [held_by(runs(layout) / model / "held", parallel, tp, stage) for stage in (0, last)]
        (first,) = (value for name, value in held[0].items() if "word_embeddings" in name)
        (output,) = (value for name, value in held[1].items() if "output_layer" in name)
        assert torch.equal(first, output)
        assert not torch.equal(first, source[tp * len(first) : (tp + 1) * len(first)])


@pytest.mark.parametrize(
    "layout", of_layouts(lambda size: size.tensor_model_parallel_size > 1 and not has_experts(size))
)
def test_rows_that_pad_the_vocabulary_get_no_gradient(runs: Runs, layout: str) -> None:
    """They are zero at the beginning, and an optimizer step keeps that only if their gradient is."""
    model = tied_model_of(layout)
    parallel = LAYOUTS[layout]
    last, stage = parallel.tensor_model_parallel_size - 1, parallel.pipeline_model_parallel_size - 1
    held = held_by(runs(layout) / model / "held", parallel, last, stage)
    (table,) = (value for name, value in held.items() if "word_embeddings" in name or "output_layer" in name)
    assert len(table) == 66  # of 132 rows for 131 tokens
    assert (table[-1] == 0).all()
    assert (table[:-1] != 0).any(1).all()


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=marks_of(layout)) for layout in ("single", *EXPERT_LAYOUTS)]
)
def test_recorded_experts_are_chosen_again(runs: Runs, layout: str) -> None:
    replayed, batch = load_file(runs(layout) / "replayed.safetensors"), routed_batch("qwen3-moe")
    logprobs, entropy, model = forced_logprobs("qwen3-moe", batch)
    found = replayed["logprobs"].amin(0)
    torch.testing.assert_close(found, logprobs.detach() * batch.sampled_mask, atol=2e-6, rtol=0)
    plain_loss(ALGORITHM, batch, logprobs, entropy).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    torch.testing.assert_close(replayed["grad_norm"], norm, atol=0, rtol=1e-5)
    with torch.no_grad():
        own, _ = plain_logprobs(make_model("qwen3-moe"), batch)
    assert (own * batch.sampled_mask - found).abs().max() > 0.01


@pytest.mark.parametrize(
    "layout", of_layouts(lambda size: size.context_parallel_size > size.expert_model_parallel_size)
)
def test_measures_of_whole_samples_add_up_over_context_ranks(runs: Runs, layout: str) -> None:
    name = one_of(layout)
    loss, norm, ratio, rejected = json.loads((runs(layout) / "by-sample.json").read_text())
    model, batch = make_model(name), make_batch(name, 0)
    logprobs, entropy = plain_logprobs(model, batch)
    wanted = plain_loss(BY_SAMPLE, batch, logprobs, entropy)
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=1e-4)
    assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item(), rel=1e-4)
    gaps = (logprobs.detach() - batch.behaviour_logprobs)[batch.loss_mask].double()
    samples = batch.sample_index[batch.loss_mask]
    sums = torch.zeros(len(batch.lengths), dtype=torch.float64).index_add(0, samples, gaps)
    means = (sums / samples.bincount(minlength=len(sums)).clamp_min(1))[samples]
    assert ratio == pytest.approx(means.exp().mean().item(), rel=1e-4)
    product = sums.clamp(-20, 20).exp()[samples]
    outside = ((product < 0.05) | (product > 1e3)).double().mean().item()
    assert rejected == pytest.approx(outside)
    assert 0 < rejected < 1

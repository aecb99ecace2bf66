"""Tests that padded decode steps, and on a GPU their graphs, compute what steps of the exact size do."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from tests.changes import slow_unless_changed
from tests.trainer.megatron.models import ALL_MODELS, HYBRIDS, save_model
from trainer.megatron.families.reading import read_architecture
from trainer.megatron.inference.cache import pages_for
from trainer.megatron.inference.graphs import decode_inputs, graph_refusal, padded_inputs, padded_size
from trainer.megatron.inference.model import CachedModel

pytestmark = slow_unless_changed("trainer/megatron/", "rollout/engines/megatron/", "tests/trainer/megatron/")
LENGTH, RUNNING = 256, 6
LENGTHS = [3, 40, 17, 16, 31]
"""Tokens of the sequences before the step; the fourth begins a page in it."""


@contextmanager
def prefilled(
    name: str, directory: Path, dtype: str = "float32"
) -> Iterator[tuple[CachedModel, list[list[int]]]]:
    """Yield a model whose cache holds `LENGTHS`, and NaN elsewhere, and their pages, in no order."""
    model = CachedModel(save_model(name, directory), dtype=dtype, running=RUNNING, length=LENGTH)
    with closing(model):
        model.graphs.on = True
        left = iter(torch.randperm(model.pages, generator=torch.Generator().manual_seed(1)).tolist())
        tables = [[next(left) for _ in range(pages_for(length + 2))] for length in LENGTHS]
        for kept in model.cache.tensors:
            kept.fill_(torch.nan)
        model.clear([page for table in tables for page in table])
        model.prefill([[(7 * n + i) % 96 for i in range(length)] for n, length in enumerate(LENGTHS)], tables)
        yield model, tables


@pytest.mark.parametrize("name", sorted(set(ALL_MODELS) - {*HYBRIDS}))
def test_padded_step_has_the_logits_and_the_cache_of_the_exact_one(name: str, tmp_path: Path) -> None:
    with prefilled(name, tmp_path) as (model, tables):
        before = [kept.clone() for kept in model.cache.tensors]
        tokens = [5, 9, 1, 0, 30]
        for count in (5, 1, 2, 3):
            given = tokens[:count], LENGTHS[:count], tables[:count]
            for kept, contents in zip(model.cache.tensors, before, strict=True):
                kept.copy_(contents)
            with torch.no_grad():
                exact = model._step(torch.tensor(decode_inputs(*given)))
            expected = [kept.clone() for kept in model.cache.tensors]
            for kept, contents in zip(model.cache.tensors, before, strict=True):
                kept.copy_(contents)
            torch.testing.assert_close(model.decode(*given), exact, atol=1e-5, rtol=1e-5)
            for kept, contents in zip(model.cache.tensors, expected, strict=True):
                torch.testing.assert_close(kept, contents, atol=1e-5, rtol=1e-5, equal_nan=True)
        assert set(model.graphs.steps) == {(6, 8), (1, 8), (2, 8), (4, 8)}


def test_layers_of_an_eager_step_call_no_function_of_autograd(tmp_path: Path) -> None:
    with prefilled("qwen2", tmp_path) as (model, tables):
        model.graphs.on = False
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model.decode([5, 9], LENGTHS[:2], tables[:2])
    called = Counter(event.name for event in profile.events())
    assert called["aten::scaled_dot_product_attention"] == model.architecture.layers > 1
    # the embedding and the output layer have some
    assert {
        name: count for name, count in called.items() if count > 1 and "::" not in name and name != "detach_"
    } == {}


def test_step_is_made_once_for_a_rung_and_dropped_with_its_memory(tmp_path: Path) -> None:
    with prefilled("qwen2", tmp_path) as (model, tables):
        for count in (3, 4, 3):
            model.decode([1, 2, 3, 4][:count], LENGTHS[:count], tables[:count])
        wide = [[*range(9)]]
        model.clear(wide[0])
        model.decode([1], [130], wide)
        assert set(model.graphs.steps) == {(4, 8), (1, 16)}
        assert model.graphs._logits.shape == (RUNNING, 131)
        model.graphs.drop()
        assert (model.graphs.steps, model.graphs._logits.numel()) == ({}, 0)


def test_rungs_are_powers_of_two_and_the_largest_size() -> None:
    assert [padded_size(number, 6) for number in range(1, 7)] == [1, 2, 4, 4, 6, 6]
    assert [padded_size(number, 512) for number in (8, 9, 129, 512)] == [8, 16, 256, 512]


def test_padding_repeats_the_first_sequence_and_the_first_page_of_each() -> None:
    inputs = decode_inputs([5, 6], [3, 20], [[4], [7, 2]])
    assert inputs == [[5, 3, 4, 4], [6, 20, 7, 2]]
    assert padded_inputs(inputs, 4, 3) == [[5, 3, 4, 4, 4], [6, 20, 7, 2, 7], *[[5, 3, 4, 4, 4]] * 2]


@pytest.mark.parametrize(
    ("name", "dtype", "records", "ranks", "reason"),
    [
        ("qwen2", torch.float32, False, 1, ""),
        ("qwen2", torch.float32, False, 2, "several tensor ranks"),
        ("qwen3-moe", torch.bfloat16, False, 1, ""),
        ("qwen3-moe", torch.bfloat16, True, 1, "experts of every pass are recorded"),
        ("qwen3-moe", torch.float32, False, 1, "host waits for the tokens of each expert"),
    ],
)
def test_model_that_cannot_be_captured_has_a_reason(
    name: str, dtype: torch.dtype, records: bool, ranks: int, reason: str, tmp_path: Path
) -> None:
    found = graph_refusal(read_architecture(save_model(name, tmp_path)), dtype, records, ranks)
    assert reason in found
    assert bool(found) == bool(reason)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gemma3", "gpt-oss", "deepseek-v3", "qwen3-moe"])
def test_replayed_graph_reads_new_inputs_and_weights(name: str, tmp_path: Path) -> None:
    with prefilled(name, tmp_path, "bfloat16") as (model, tables):
        seen = []
        for factor in (1.0, 1.5):
            for parameter in model.parameters.values():
                parameter.mul_(factor)
            for shift in (0, 1):
                given = [5, 9, 1, 0, 30], [length + shift for length in LENGTHS], tables
                found = model.decode(*given).clone()
                padded = torch.tensor(padded_inputs(decode_inputs(*given), RUNNING, 8), device=found.device)
                with torch.no_grad():
                    exact = model._step(padded)[: len(LENGTHS)]
                torch.testing.assert_close(found, exact.float(), atol=0.02, rtol=0.02)
                assert all((found - other).abs().max() > 0.1 for other in seen)
                seen.append(found)
        assert set(model.graphs.steps) == {(RUNNING, 8)}
        assert found.is_cuda

"""Tests that both backends, in every layout, start from the source's bits, train as plain torch, restore.

tests/trainer/megatron/test_layouts.py and tests/trainer/fsdp/test_backend.py have what one of them has alone.
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.trainer.fsdp import ranks as sharded_ranks
from tests.trainer.fsdp.ranks import SHARDED
from tests.trainer.megatron.layout_runs import Runs, marks_of, same_bits
from tests.trainer.megatron.layouts import LAYOUTS, models_of
from tests.trainer.megatron.models import make_batch, make_model, plain_logprobs, step_batch, tensors_of

pytestmark = pytest.mark.xdist_group("layouts")  # what `runs` sets up once, not one for each process

EACH = pytest.mark.parametrize(
    ("layout", "model"),
    [
        pytest.param(layout, model, marks=marks_of(layout))
        for layout in (*LAYOUTS, *SHARDED)
        for model in (sharded_ranks.models_of(layout) if layout in SHARDED else models_of(layout))
    ],
)


@EACH
def test_export_before_training_is_the_source(runs: Runs, layout: str, model: str) -> None:
    exported = load_file(runs(layout) / model / "before.safetensors")
    source = tensors_of(make_model(model))
    assert exported.keys() == source.keys()
    assert [name for name in source if not torch.equal(exported[name], source[name])] == []


@EACH
def test_logprobs_equal_hugging_face(runs: Runs, layout: str, model: str) -> None:
    of_ranks = load_file(runs(layout) / model / "logprobs.safetensors")["first"]
    logprobs = of_ranks.amin(0)  # 0 on the ranks of other replicas
    assert all(((row == logprobs) | (row == 0)).all() for row in of_ranks)
    replicas = (LAYOUTS | SHARDED)[layout].data_parallel_size
    assert ((of_ranks != 0).sum(0) == len(of_ranks) // replicas * (logprobs != 0)).all()
    batch = make_batch(model, 0)
    with torch.no_grad():
        expected, _ = plain_logprobs(make_model(model), batch)
    torch.testing.assert_close(logprobs, expected * batch.sampled_mask, atol=4e-6, rtol=0)


@EACH
def test_training_equals_plain_torch(runs: Runs, layout: str, model: str) -> None:
    directory, sharded = runs(layout) / model, layout in SHARDED
    expected_stats, expected = runs.plain(model, balanced=not sharded)
    found = json.loads((directory / "stats.json").read_text())
    for step, (stats, wanted) in enumerate(zip(found, expected_stats, strict=True)):
        assert stats.pop("skipped") == ""
        assert 1 <= stats.pop("micro_batches") <= 14
        padding, shared, computed = map(stats.pop, ("padding_share", "shared_share", "computed_tokens"))
        assert shared < 0.1  # these samples begin alike by chance
        if sharded:
            batch = step_batch(model, step)
            assert padding == 0
            assert computed == pytest.approx((1 - shared) * (len(batch.tokens) - len(batch.lengths)))
            wanted = {name: value for name, value in wanted.items() if not name.startswith("expert_load")}
        # one sample of 11 tokens leaves one of two micro-batches empty, and both of another replica
        assert 0 <= padding < 0.25
        assert computed > 0
        assert stats == pytest.approx(wanted, rel=5e-5, abs=2e-5)  # rel: a gradient norm of 20 in float32
    trained = load_file(directory / "after.safetensors")
    assert max((trained[name] - expected[name]).abs().max().item() for name in expected) < 1e-5


@EACH
def test_continuing_from_a_checkpoint_is_bit_identical(runs: Runs, layout: str, model: str) -> None:
    directory = runs(layout) / model
    assert same_bits(directory / "after.safetensors", directory / "restored.safetensors")


@EACH
def test_engine_ranks_get_their_slices_from_the_ranks_that_hold_them(
    runs: Runs, layout: str, model: str
) -> None:
    """The ranks have compared what arrived with the export."""
    directory, ranks = runs(layout) / model, (LAYOUTS | SHARDED)[layout].world_size
    if ranks == 1:
        assert not (directory / "published.json").exists()
        return
    found = json.loads((directory / "published.json").read_text())
    assert found == {"tensors": len(load_file(directory / "after.safetensors")), "parts": ranks}


@EACH
def test_reference_stays_while_the_model_moves(runs: Runs, layout: str, model: str) -> None:
    directory = runs(layout) / model
    kept = load_file(directory / "reference.safetensors")
    assert torch.equal(kept["first"], load_file(directory / "logprobs.safetensors")["first"])
    assert not torch.equal(kept["now"], kept["first"])


@EACH
def test_saved_checkpoint_loads_in_transformers(runs: Runs, layout: str, model: str) -> None:
    directory = runs(layout) / model
    loaded = tensors_of(transformers.AutoModelForCausalLM.from_pretrained(directory / "hf"))
    exported = load_file(directory / "after.safetensors")
    assert loaded.keys() == exported.keys()
    assert [name for name in loaded if not torch.equal(loaded[name], exported[name])] == []

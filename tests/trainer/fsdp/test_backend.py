"""Tests that models sharded over ranks train as plain torch does, and that no rank holds one whole."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from protocol.errors import SettingsError
from tests.trainer.exports import read_export
from tests.trainer.fsdp.ranks import (
    ADAPTED,
    BFLOAT16,
    DIVIDED,
    FROM,
    MODELS,
    MOVED,
    OFFLOADED,
    OFFLOADS,
    RECOMPUTED,
    SEEDS,
    SHARDED,
    SHARING,
    make_backend,
    models_of,
)
from tests.trainer.lora.oracle import LORA, targets_of, trained_by_hand
from tests.trainer.lora.oracle import STEPS as ADAPTER_STEPS
from tests.trainer.megatron.layout_runs import IF_CHANGED, Runs, marks_of
from tests.trainer.megatron.models import (
    make_batch,
    make_model,
    step_batch,
    tensors_of,
)
from tests.trainer.megatron.plain import PlainTrainer
from tests.trainer.megatron.ranks import ALGORITHM, STEPS
from trainer.lora import merged
from trainer.reference.shards import local_tensor

RANKS = [1, 2, pytest.param(3, marks=pytest.mark.slow)]
LAYOUTS = [*RANKS, "tp2", pytest.param("tp2-dp2", marks=pytest.mark.slow)]

pytestmark = [
    pytest.mark.xdist_group("layouts"),  # one process forks the ranks of all
    IF_CHANGED,
]


Results = Callable[[int | str], Path]


@pytest.fixture
def results(runs: Runs) -> Results:
    """Results by number of data-parallel ranks, or by layout."""
    return lambda ranks: runs(f"fsdp-{ranks}")


EACH = [pytest.mark.parametrize("ranks", RANKS), pytest.mark.parametrize("model", MODELS)]


def each(test: object) -> object:
    for mark in EACH:
        test = mark(test)
    return test


@each
def test_a_rank_reads_its_shards_alone(results: Results, ranks: int, model: str) -> None:
    found = json.loads((results(ranks) / model / "loaded.json").read_text())
    parameters = list(dict(make_model(model).named_parameters()).values())
    assert found["sum"] == sum(parameter.numel() for parameter in parameters)
    rows = sum(-(-len(parameter) // ranks) * parameter[0].numel() for parameter in parameters)
    assert found["own"] <= rows


ADAPTERS = [
    pytest.param(layout, model, marks=marks_of(layout))
    for layout in SHARDED
    for model in (ADAPTED if models_of(layout) == DIVIDED else ADAPTED[:1])
]


@pytest.mark.parametrize(("layout", "model"), [one for one in ADAPTERS if one.values[0] != "fsdp-1"])
def test_every_rank_publishes_its_shards_of_adapters(runs: Runs, layout: str, model: str) -> None:
    """The ranks have compared what arrived with the export."""
    directory = runs(layout) / "adapters" / model
    found = json.loads((directory / "published.json").read_text())
    ranks = SHARDED[layout].world_size
    assert found == {"tensors": len(load_file(directory / "after.safetensors")), "parts": ranks}


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_a_checkpoint_is_divided_between_the_ranks(results: Results, ranks: int) -> None:
    files = sorted((results(ranks) / "qwen2" / "after-one").glob("rank_*.safetensors"))
    assert len(files) == ranks
    name = "master.model.embed_tokens.weight"
    rows = []
    for path in files:
        with safe_open(str(path), framework="pt") as file:
            rows.append(file.get_slice(name).get_shape()[0])
    assert sum(rows) == 131
    assert max(rows) == -(-131 // ranks)


SEVERAL = [
    pytest.param(layout, model, marks=marks_of(layout))
    for layout in SHARDED
    for model in models_of(layout)
    if layout != "fsdp-1"
]


@pytest.mark.parametrize(("layout", "model"), SEVERAL)
def test_one_rank_continues_what_several_saved(runs: Runs, layout: str, model: str) -> None:
    directory = runs(layout) / model
    backend = make_backend(runs.models / model)
    backend.restore(directory / "after-one")
    for step in range(1, STEPS):
        backend.train_step(step_batch(model, step))
    found, expected = dict(backend.export()), load_file(directory / "after.safetensors")
    backend.close()
    assert max((found[name] - expected[name]).abs().max().item() for name in expected) < 1e-6


@pytest.mark.parametrize("layout", [pytest.param(layout, marks=marks_of(layout)) for layout in FROM])
@pytest.mark.parametrize("model", MOVED)
def test_a_layout_continues_what_another_one_saved(runs: Runs, layout: str, model: str) -> None:
    found = load_file(runs(layout) / model / "went-on.safetensors")
    expected = load_file(runs(FROM[layout]) / model / "after.safetensors")
    assert max((found[name] - expected[name]).abs().max().item() for name in expected) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS[len(RANKS) :])
def test_a_plan_that_fails_or_leaves_out_a_gradient_is_refused_before_the_first_update(
    results: Results, layout: str
) -> None:
    text = (results(layout) / "left-out.txt").read_text()
    assert "different gradients of model.layers.0.self_attn.q_norm.weight" in text
    text = (results(layout) / "failed.txt").read_text()
    assert "a pass by transformers' plan for model_type 'granite_swa' fails: aten" in text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_computed_again_change_nothing(results: Results, layout: int | str) -> None:
    again = load_file(results(layout) / "recompute" / "after.safetensors")
    kept = load_file(results(layout) / RECOMPUTED / "after.safetensors")
    assert max((again[name] - kept[name]).abs().max().item() for name in kept) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("offload", OFFLOADS)
def test_training_with_a_part_in_host_memory_equals_plain_torch(
    runs: Runs, results: Results, layout: int | str, offload: str
) -> None:
    """Continued from its own checkpoint, or from the one of an optimizer on the device, too."""
    directory, (_, expected) = results(layout) / "offload" / offload, runs.plain(OFFLOADED, balanced=False)
    after, restored, other = (
        load_file(directory / f"{name}.safetensors") for name in ("after", "restored", "from-device")
    )
    assert [name for name in after if not torch.equal(after[name], restored[name])] == []
    for found in (after, other):
        assert max((found[name] - expected[name]).abs().max().item() for name in expected) < 1e-5


@pytest.mark.parametrize("ranks", RANKS[1:])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_one_rank_continues_on_its_device_what_several_stepped_on_the_host(
    runs: Runs, results: Results, ranks: int, offload: str
) -> None:
    directory = results(ranks) / "offload" / offload
    backend = make_backend(runs.models / OFFLOADED)
    backend.restore(directory / "after-one")
    for step in range(1, STEPS):
        backend.train_step(step_batch(OFFLOADED, step))
    found, expected = dict(backend.export()), load_file(directory / "after.safetensors")
    backend.close()
    assert max((found[name] - expected[name]).abs().max().item() for name in expected) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", sorted(SHARING.keys() & DIVIDED))
@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_that_are_computed_once_give_what_rows_give(
    results: Results, layout: int | str, model: str, seed: int
) -> None:
    assert_shared_is_rows(results(layout), model, seed)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("seed", SEEDS)
def test_sinks_and_windows_share_tokens(results: Results, ranks: int, seed: int) -> None:
    assert_shared_is_rows(results(ranks), "gpt-oss", seed)


def assert_shared_is_rows(directory: Path, model: str, seed: int) -> None:
    """To 1e-6 of the norm; the gradients together are one vector."""
    shared, rows = (
        load_file(directory / "shared" / model / f"{share}-{seed}.safetensors") for share in ("auto", "off")
    )
    (share, padding, computed), (none, _, whole) = shared.pop("counts"), rows.pop("counts")
    assert (none, padding) == (0, 0)
    assert share > 0.1
    assert computed == pytest.approx((1 - share) * whole)
    logprobs = rows.pop("logprobs")
    assert (shared.pop("logprobs") - logprobs).norm() <= 1e-6 * logprobs.norm()
    scale = torch.nn.utils.get_total_norm(list(rows.values()))
    assert shared.keys() == rows.keys()
    for name, gradient in rows.items():
        assert (shared[name] - gradient).norm() <= 1e-6 * scale, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_trains_float32_masters(results: Results, layout: int | str) -> None:
    directory = results(layout) / "bfloat16"
    before, after = load_file(directory / "before.safetensors"), load_file(directory / "after.safetensors")
    source = tensors_of(make_model(BFLOAT16))
    assert all(torch.equal(before[name], source[name].bfloat16()) for name in before)
    trainer = PlainTrainer(BFLOAT16, ALGORITHM)
    expected, norm = trainer.step(make_batch(BFLOAT16, 0)), float(after.pop("norm"))
    assert norm == pytest.approx(expected["grad_norm"], rel=0.05)
    moved = [name for name in after if not torch.equal(after[name], before[name])]
    assert moved


@pytest.mark.parametrize(("layout", "model"), ADAPTERS)
def test_adapters_train_what_the_merged_weights_say(runs: Runs, layout: str, model: str) -> None:
    directory = runs(layout) / "adapters" / model
    losses, expected = trained_by_hand(model)
    found = load_file(directory / "after.safetensors")
    assert json.loads((directory / "losses.json").read_text()) == pytest.approx(losses, abs=2e-5)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    targets, whole = {t.weight: t for t in targets_of(model)}, read_export(directory / "merged")
    source = tensors_of(make_model(model))
    assert whole.keys() <= source.keys()
    for name, tensor in whole.items():
        wanted = merged(targets[name], source[name], found, LORA) if name in targets else source[name]
        assert torch.equal(tensor, wanted), name


@pytest.mark.parametrize(("layout", "model"), ADAPTERS)
def test_a_layout_continues_the_adapters_of_another_one(runs: Runs, layout: str, model: str) -> None:
    """One rank those of several, and some layouts those of a further one; the last updates are equal."""
    directory = runs(layout) / "adapters" / model
    expected = load_file(directory / "after.safetensors")
    backend = make_backend(runs.models / model, adapters=LORA)
    backend.restore(directory / "after-one")
    for step in range(1, ADAPTER_STEPS):
        backend.train_step(make_batch(model, step))
    continued = [dict(backend.export())]
    backend.close()
    if layout in FROM and model == ADAPTED[0]:
        continued.append(load_file(directory / "went-on.safetensors"))
    for found in continued:
        assert max((found[name] - expected[name]).abs().max().item() for name in expected) < 1e-6


@pytest.mark.parametrize("model", ADAPTED)
def test_gradients_of_divided_adapters_are_those_of_one_rank(runs: Runs, model: str) -> None:
    """The first moments after an update are a multiple of the gradients."""
    directory = runs("fsdp-tp2") / "adapters" / model
    backend = make_backend(runs.models / model, adapters=LORA)
    backend.train_step(make_batch(model, 0))
    expected = {name: p.detach().clone() for name, p in backend._stepper.masters.items()}
    moments = {
        name: backend._stepper.optimizer.state[backend._stepper.stepped(name)]["exp_avg"].clone()
        for name in expected
    }
    backend.restore(directory / "after-one")
    for name, moment in moments.items():
        found = backend._stepper.optimizer.state[backend._stepper.stepped(name)]["exp_avg"]
        assert (local_tensor(found) - local_tensor(moment)).abs().max() < 1e-6, name
    backend.close()


def test_tensor_parallel_ranks_drop_what_one_rank_drops(results: Results) -> None:
    found, expected = (
        load_file(results(layout) / "adapters" / ADAPTED[0] / "dropped.safetensors") for layout in (1, "tp2")
    )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    kept = load_file(results(1) / "adapters" / ADAPTED[0] / "after.safetensors")
    assert any((found[name] - kept[name]).abs().max() > 1e-4 for name in found)


def test_a_world_of_another_size_is_refused(runs: Runs) -> None:
    with pytest.raises(SettingsError, match=r"asks for 2 processes .* but 1 are running"):
        make_backend(runs.models / MODELS[0], "fsdp-2")

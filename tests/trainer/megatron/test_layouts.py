"""Tests that every layout starts from the source's bits, trains as plain torch does, and restores exactly."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.trainer.megatron.by_hand import gather_by_hand
from tests.trainer.megatron.launch import launch
from tests.trainer.megatron.models import (
    ALL_MODELS,
    forced_logprobs,
    make_batch,
    make_model,
    plain_logprobs,
    plain_loss,
    routed_batch,
    save_model,
    step_batch,
    tensors_of,
)
from tests.trainer.megatron.plain import PlainTrainer
from tests.trainer.megatron.ranks import ALGORITHM, EXPERT_LAYOUTS, LAYOUTS, STEPS, models_of, one_of, run

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
    torch.testing.assert_close(logprobs, expected * batch.sampled_mask, atol=4e-6, rtol=0)


@EACH_LAYOUT_AND_MODEL
def test_training_equals_plain_torch(runs: Runs, layout: str, model: str) -> None:
    directory = runs(layout) / model
    expected_stats, expected = runs.plain(model)
    for stats, wanted in zip(json.loads((directory / "stats.json").read_text()), expected_stats, strict=True):
        assert stats.pop("skipped") == ""
        assert 1 <= stats.pop("micro_batches") <= 13
        assert 0 <= stats.pop("padding_share") < 0.25  # each of four replicas computes at least one token
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

"""Tests that models sharded over ranks train as plain torch does, and that no rank holds one whole."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from protocol.errors import SettingsError
from tests.changes import slow_unless_changed
from tests.trainer.exports import read_export
from tests.trainer.fsdp.ranks import (
    ADAPTED,
    BFLOAT16,
    MODELS,
    OFFLOADED,
    OFFLOADS,
    SEEDS,
    SHARING,
    make_backend,
    run,
)
from tests.trainer.lora.oracle import LORA, targets_of, trained_by_hand
from tests.trainer.megatron.launch import launch
from tests.trainer.megatron.models import (
    make_batch,
    make_model,
    plain_logprobs,
    save_model,
    step_batch,
    tensors_of,
)
from tests.trainer.megatron.plain import PlainTrainer
from tests.trainer.megatron.ranks import ALGORITHM, STEPS
from trainer.lora import merged

RANKS = [1, 2, pytest.param(3, marks=pytest.mark.slow)]

pytestmark = [
    pytest.mark.xdist_group("layouts"),  # one process forks the ranks of all
    slow_unless_changed("trainer/fsdp/", "trainer/layers/", "trainer/optimizers/", "trainer/weights/"),
]


class Ranks:
    """Results by number of ranks, each launched once, when first asked for."""

    def __init__(self, root: Path) -> None:
        self.root, self.models = root, root / "models"
        for name in {*MODELS, BFLOAT16, ADAPTED}:
            save_model(name, self.models)
        self._plain: dict[str, tuple[list[dict[str, float]], dict[str, torch.Tensor]]] = {}

    def __call__(self, ranks: int) -> Path:
        out = self.root / str(ranks)
        if not out.exists():
            out.mkdir()
            if ranks == 1:
                run(1, self.models, out)
            else:
                arguments = str(ranks), str(self.models), str(out)
                launch(ranks, "tests.trainer.fsdp.ranks", *arguments, logs=self.root / f"logs-{ranks}")
        return out

    def plain(self, model: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        """Statistics of each step and the weights after the last, from plain torch."""
        if model not in self._plain:
            trainer = PlainTrainer(model, ALGORITHM)
            trainer.balance = None
            stats = [trainer.step(step_batch(model, step)) for step in range(STEPS)]
            self._plain[model] = stats, trainer.weights()
        return self._plain[model]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    torch.set_num_threads(1)
    return Ranks(tmp_path_factory.mktemp("fsdp"))


EACH = [pytest.mark.parametrize("ranks", RANKS), pytest.mark.parametrize("model", MODELS)]


def each(test: object) -> object:
    for mark in EACH:
        test = mark(test)
    return test


@each
def test_export_before_training_is_the_source(results: Ranks, ranks: int, model: str) -> None:
    exported, source = load_file(results(ranks) / model / "before.safetensors"), tensors_of(make_model(model))
    assert exported.keys() == source.keys()
    assert [name for name in source if not torch.equal(exported[name], source[name])] == []


@each
def test_logprobs_equal_hugging_face(results: Ranks, ranks: int, model: str) -> None:
    found = load_file(results(ranks) / model / "logprobs.safetensors")["first"].amin(0)
    batch = make_batch(model, 0)
    with torch.no_grad():
        expected, _ = plain_logprobs(make_model(model), batch)
    torch.testing.assert_close(found, expected * batch.sampled_mask, atol=4e-6, rtol=0)


@each
def test_training_equals_plain_torch(results: Ranks, ranks: int, model: str) -> None:
    directory = results(ranks) / model
    expected_stats, expected = results.plain(model)
    found = json.loads((directory / "stats.json").read_text())
    for step, (stats, wanted) in enumerate(zip(found, expected_stats, strict=True)):
        assert stats.pop("skipped") == ""
        assert 1 <= stats.pop("micro_batches") <= 14
        assert stats.pop("padding_share") == 0
        batch = step_batch(model, step)
        inputs, own = len(batch.tokens) - len(batch.lengths), 1 - stats.pop("shared_share")
        assert stats.pop("computed_tokens") == pytest.approx(own * inputs)
        wanted = {name: value for name, value in wanted.items() if not name.startswith("expert_load")}
        assert stats == pytest.approx(wanted, rel=5e-5, abs=2e-5)
    trained = load_file(directory / "after.safetensors")
    assert max((trained[name] - expected[name]).abs().max().item() for name in expected) < 1e-5


@each
def test_continuing_from_a_checkpoint_is_bit_identical(results: Ranks, ranks: int, model: str) -> None:
    directory = results(ranks) / model
    after, restored = (load_file(directory / f"{name}.safetensors") for name in ("after", "restored"))
    assert [name for name in after if not torch.equal(after[name], restored[name])] == []


@each
def test_reference_stays_while_the_model_moves(results: Ranks, ranks: int, model: str) -> None:
    kept = load_file(results(ranks) / model / "reference.safetensors")
    assert torch.equal(kept["first"], load_file(results(ranks) / model / "logprobs.safetensors")["first"])
    assert not torch.equal(kept["now"], kept["first"])


@each
def test_exported_model_loads_in_transformers(results: Ranks, ranks: int, model: str) -> None:
    loaded = tensors_of(transformers.AutoModelForCausalLM.from_pretrained(results(ranks) / model / "hf"))
    exported = load_file(results(ranks) / model / "after.safetensors")
    assert loaded.keys() == exported.keys()
    assert [name for name in loaded if not torch.equal(loaded[name], exported[name])] == []


@pytest.mark.parametrize("ranks", RANKS[1:])
@pytest.mark.parametrize("model", [*MODELS, "adapters"])
def test_every_rank_publishes_its_shards(results: Ranks, ranks: int, model: str) -> None:
    """The ranks have compared what arrived with the export."""
    found = json.loads((results(ranks) / model / "published.json").read_text())
    assert found == {"tensors": len(load_file(results(ranks) / model / "after.safetensors")), "parts": ranks}


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_a_checkpoint_is_divided_between_the_ranks(results: Ranks, ranks: int) -> None:
    files = sorted((results(ranks) / "qwen2" / "after-one").glob("rank_*.safetensors"))
    assert len(files) == ranks
    name = "master.model.embed_tokens.weight"
    rows = []
    for path in files:
        with safe_open(str(path), framework="pt") as file:
            rows.append(file.get_slice(name).get_shape()[0])
    assert sum(rows) == 131
    assert max(rows) == -(-131 // ranks)


@pytest.mark.parametrize("ranks", RANKS[1:])
@pytest.mark.parametrize("model", MODELS)
def test_one_rank_continues_what_several_saved(results: Ranks, ranks: int, model: str) -> None:
    backend = make_backend(results.models / model)
    backend.restore(results(ranks) / model / "after-one")
    for step in range(1, STEPS):
        backend.train_step(step_batch(model, step))
    found, expected = dict(backend.export()), load_file(results(ranks) / model / "after.safetensors")
    backend.close()
    assert max((found[name] - expected[name]).abs().max().item() for name in expected) < 1e-6


@pytest.mark.parametrize("ranks", RANKS)
def test_layers_computed_again_change_nothing(results: Ranks, ranks: int) -> None:
    again = load_file(results(ranks) / "recompute" / "after.safetensors")
    kept = load_file(results(ranks) / MODELS[0] / "after.safetensors")
    assert max((again[name] - kept[name]).abs().max().item() for name in kept) < 1e-6


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("offload", OFFLOADS)
def test_training_with_a_part_in_host_memory_equals_plain_torch(
    results: Ranks, ranks: int, offload: str
) -> None:
    """Continued from its own checkpoint, or from the one of an optimizer on the device, too."""
    directory, (_, expected) = results(ranks) / "offload" / offload, results.plain(OFFLOADED)
    after, restored, other = (
        load_file(directory / f"{name}.safetensors") for name in ("after", "restored", "from-device")
    )
    assert [name for name in after if not torch.equal(after[name], restored[name])] == []
    for found in (after, other):
        assert max((found[name] - expected[name]).abs().max().item() for name in expected) < 1e-5


@pytest.mark.parametrize("ranks", RANKS[1:])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_one_rank_continues_on_its_device_what_several_stepped_on_the_host(
    results: Ranks, ranks: int, offload: str
) -> None:
    directory = results(ranks) / "offload" / offload
    backend = make_backend(results.models / OFFLOADED)
    backend.restore(directory / "after-one")
    for step in range(1, STEPS):
        backend.train_step(step_batch(OFFLOADED, step))
    found, expected = dict(backend.export()), load_file(directory / "after.safetensors")
    backend.close()
    assert max((found[name] - expected[name]).abs().max().item() for name in expected) < 1e-6


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", SHARING)
@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_that_are_computed_once_give_what_rows_give(
    results: Ranks, ranks: int, model: str, seed: int
) -> None:
    """To 1e-6 of the norm; the gradients together are one vector."""
    shared, rows = (
        load_file(results(ranks) / "shared" / model / f"{share}-{seed}.safetensors")
        for share in ("auto", "off")
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


@pytest.mark.parametrize("ranks", RANKS)
def test_bfloat16_trains_float32_masters(results: Ranks, ranks: int) -> None:
    directory = results(ranks) / "bfloat16"
    before, after = load_file(directory / "before.safetensors"), load_file(directory / "after.safetensors")
    source = tensors_of(make_model(BFLOAT16))
    assert all(torch.equal(before[name], source[name].bfloat16()) for name in before)
    trainer = PlainTrainer(BFLOAT16, ALGORITHM)
    expected, norm = trainer.step(make_batch(BFLOAT16, 0)), float(after.pop("norm"))
    assert norm == pytest.approx(expected["grad_norm"], rel=0.05)
    moved = [name for name in after if not torch.equal(after[name], before[name])]
    assert moved


@pytest.mark.parametrize("ranks", RANKS)
def test_adapters_train_what_the_merged_weights_say(results: Ranks, ranks: int) -> None:
    directory = results(ranks) / "adapters"
    losses, expected = trained_by_hand(ADAPTED)
    found = load_file(directory / "after.safetensors")
    assert json.loads((directory / "losses.json").read_text()) == pytest.approx(losses, abs=2e-5)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    targets, whole = {t.weight: t for t in targets_of(ADAPTED)}, read_export(directory / "merged")
    source = dict(make_model(ADAPTED).named_parameters())
    for name, tensor in whole.items():
        weight = source[name].detach()
        wanted = merged(targets[name], weight, found, LORA) if name in targets else weight
        assert torch.equal(tensor, wanted), name


def test_a_world_of_another_size_is_refused(results: Ranks) -> None:
    with pytest.raises(SettingsError, match=r"asks for 2 processes, but 1 are running"):
        make_backend(results.models / MODELS[0], ranks=2)

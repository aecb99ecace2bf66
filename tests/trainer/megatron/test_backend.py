"""Tests one rank of the Megatron backend: what it refuses and skips, and that its bits are reproducible."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from protocol.errors import SettingsError
from tests.trainer.checkpoints import save_part
from tests.trainer.megatron.models import OPTIMIZER, make_batch, make_model, save_model
from tests.trainer.megatron.ranks import ALGORITHM
from trainer.backends.base import StepStats
from trainer.batch import Batch, StepTotals
from trainer.config import ParallelConfig, TrainerConfig
from trainer.megatron.backend import MegatronBackend
from trainer.reference.backend import ReferenceBackend

pytestmark = pytest.mark.xdist_group("megatron_backend")  # one fixture for the module

NAME = "qwen2"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_model(NAME, tmp_path_factory.mktemp("model"))


def make_backend(
    model_dir: Path, *, parallel: ParallelConfig | None = None, **trainer: object
) -> MegatronBackend:
    settings = TrainerConfig(device="cpu", **trainer)  # type: ignore[arg-type]
    return MegatronBackend(
        model_dir,
        parallel=parallel or ParallelConfig(),
        optimizer=OPTIMIZER,
        trainer=settings,
        algorithm=ALGORITHM,
    )


@pytest.fixture
def backend(model_dir: Path) -> Iterator[MegatronBackend]:
    made = make_backend(model_dir)
    yield made
    made.close()


def trained(model_dir: Path, **trainer: object) -> dict[str, torch.Tensor]:
    backend = make_backend(model_dir, **trainer)
    for step in range(2):
        backend.train_step(make_batch(NAME, step))
    weights = dict(backend.export())
    backend.close()
    return weights


def test_training_twice_gives_the_same_bits(model_dir: Path) -> None:
    first, second = trained(model_dir), trained(model_dir)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("limits", [{"micro_batch_size": 5}, {"micro_batch_tokens": 1}])
def test_the_micro_batches_do_not_change_the_result(model_dir: Path, limits: dict[str, int]) -> None:
    first, second = trained(model_dir), trained(model_dir, **limits)
    assert all((first[name] - second[name]).abs().max() < 1e-5 for name in first)


def test_a_step_says_how_it_was_packed(backend: MegatronBackend) -> None:
    stats = backend.train_step(make_batch(NAME, 0))
    assert (stats.micro_batches, stats.padding_share) == (1, 0.0)


def test_costs_grow_with_the_square_of_the_length(backend: MegatronBackend) -> None:
    short, long, longest = backend.costs(torch.tensor([100, 200, 10_000])).tolist()
    # 2 layers of hidden size 64 with 4 heads of 32, 2 of them for keys, and an MLP of 96
    assert short == 2 * (6 * (64 * 128 * 2 + 64 * 64 * 2 + 3 * 64 * 96) * 100 + 6 * 128 * 100**2)
    assert 2 < long / short < 4
    assert longest / long > 100


def test_a_world_of_another_size_is_refused(model_dir: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"asks for 2 processes .* but 1 are running: start the trainer with torchrun"
    ):
        make_backend(model_dir, parallel=ParallelConfig(tensor_model_parallel_size=2))
    assert not dist.is_initialized()


def test_a_step_with_an_infinite_gradient_is_skipped_and_changes_nothing(backend: MegatronBackend) -> None:
    batch = make_batch(NAME, 0)
    before = dict(backend.export())
    stats = backend.train_step(replace(batch, advantages=batch.advantages * float("inf")))
    assert stats.skipped.startswith("overflow: gradient norm")
    assert all(torch.equal(before[name], tensor) for name, tensor in backend.export())
    assert backend.train_step(batch).skipped == ""


def test_a_batch_without_a_trained_token_is_skipped(backend: MegatronBackend) -> None:
    batch = make_batch(NAME, 0)
    before = dict(backend.export())
    stats = backend.train_step(
        replace(
            batch,
            loss_mask=torch.zeros_like(batch.loss_mask),
            totals=StepTotals(samples=13, trained_tokens=0, lag_max=0, fresh=False),
        )
    )
    assert (stats.trained_tokens, stats.loss, stats.grad_norm) == (0, None, None)
    assert "no token" in stats.skipped
    assert all(torch.equal(before[name], tensor) for name, tensor in backend.export())


def trained_by_both(
    model_dir: Path, batches: list[Batch]
) -> tuple[list[StepStats], list[StepStats], dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """What the oracle and megatron make of the same batches: their stats, and each tensor of either."""
    optimizer = replace(OPTIMIZER, lr_warmup_steps=4)
    reference = ReferenceBackend(
        model_dir, optimizer=optimizer, trainer=TrainerConfig(device="cpu"), algorithm=ALGORITHM
    )
    megatron = MegatronBackend(
        model_dir,
        parallel=ParallelConfig(),
        optimizer=optimizer,
        trainer=TrainerConfig(device="cpu"),
        algorithm=ALGORITHM,
    )
    stats = [[backend.train_step(batch) for batch in batches] for backend in (reference, megatron)]
    weights = dict(megatron.export())
    both = {name: (tensor, weights[name]) for name, tensor in reference.export()}
    megatron.close()
    return stats[0], stats[1], both


def test_the_oracle_trains_the_padding_token_as_megatron_does(tmp_path: Path) -> None:
    make_model(NAME, pad_token_id=0).save_pretrained(tmp_path)
    before = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    batches = [make_batch(NAME, step) for step in range(2)]
    for batch in batches:
        batch.tokens[batch.offsets[:-1] + 4] = 0  # sampled, and followed by trained tokens
    _, _, weights = trained_by_both(tmp_path, batches)
    for name, (expected, found) in weights.items():
        torch.testing.assert_close(found, expected, atol=5e-5, rtol=0, msg=name)
    assert (weights["model.embed_tokens.weight"][0][0] - before[0]).abs().max() > 1e-4


def test_the_warm_up_after_a_skipped_step_is_the_same_in_both_backends(model_dir: Path) -> None:
    batches = [make_batch(NAME, step) for step in range(4)]
    batches[1] = replace(batches[1], advantages=batches[1].advantages * float("inf"))
    oracle, megatron, weights = trained_by_both(model_dir, batches)
    for stats in (oracle, megatron):
        assert [step.skipped != "" for step in stats] == [False, True, False, False]
    for name, (expected, found) in weights.items():
        torch.testing.assert_close(found, expected, atol=5e-5, rtol=0, msg=name)


def test_exported_tensors_are_copies(backend: MegatronBackend) -> None:
    for _, tensor in backend.export():
        tensor.zero_()
    assert all(tensor.abs().max() > 0 for _, tensor in backend.export())


def test_reference_logprobs_need_a_reference(backend: MegatronBackend) -> None:
    with pytest.raises(RuntimeError, match="keep_reference"):
        backend.reference_logprobs(make_batch(NAME, 0))


def test_a_checkpoint_of_another_model_is_refused(backend: MegatronBackend, tmp_path: Path) -> None:
    other = make_backend(save_model("llama", tmp_path))
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    save_part(other, checkpoint)
    other.close()
    with pytest.raises(
        SettingsError, match=r"model\.model_type is 'llama' in the checkpoint and 'qwen2' in the run"
    ):
        backend.restore(checkpoint)


def test_an_incomplete_checkpoint_is_refused(backend: MegatronBackend, tmp_path: Path) -> None:
    save_part(backend, tmp_path)
    (tmp_path / "rank-00000.safetensors").unlink()
    with pytest.raises(SettingsError, match="it is incomplete"):
        backend.restore(tmp_path)


def test_the_bias_of_a_choice_keeps_its_bits_in_bfloat16(tmp_path: Path) -> None:
    model_dir = save_model("deepseek-v3", tmp_path)
    backend = make_backend(model_dir, dtype="bfloat16")
    exported = dict(backend.export())
    backend.close()
    source = load_file(model_dir / "model.safetensors")
    exact = [name for name in exported if exported[name].dtype is torch.float32]
    assert exact == ["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert all(torch.equal(exported[name], source[name].to(exported[name].dtype)) for name in source)

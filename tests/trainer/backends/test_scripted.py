"""Tests the scripted backend: its weight depends on every batch, and its checkpoints restore."""

from pathlib import Path

import pytest
import torch

from protocol.errors import SettingsError
from tests.trainer.checkpoints import save_part
from tests.trainer.groups import GroupSpec, SampleSpec, batch_of, scored
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.backends.scripted import ScriptedBackend
from trainer.batch import Batch
from trainer.config import TrainerConfig

ALGORITHM = make_algorithm(AlgorithmConfig())


def scripted() -> ScriptedBackend:
    return ScriptedBackend(trainer=TrainerConfig(backend="scripted"))


def batch(step: int = 0, token: int = 5) -> Batch:
    spec = GroupSpec(samples=[SampleSpec([token, 6], [step, step], 1.0), SampleSpec([7], [step])])
    return batch_of([(scored(spec), 0)], step=step, algorithm=ALGORITHM, mask_late=False)


def weight(backend: ScriptedBackend) -> torch.Tensor:
    ((name, tensor),) = backend.export()
    assert name == "scripted.weight"
    return tensor.clone()


def test_scripted_weights_change_with_every_step_and_tell_the_batches() -> None:
    backend, twin, other = scripted(), scripted(), scripted()
    seen = [weight(backend)]
    for step in range(20):
        stats = backend.train_step(batch(step))
        assert (stats.trained_tokens, stats.skipped) == (3, "")
        assert all(not torch.equal(weight(backend), before) for before in seen)
        seen.append(weight(backend))
        twin.train_step(batch(step))
        other.train_step(batch(step, token=5 if step != 3 else 4))
    assert torch.equal(weight(twin), weight(backend))
    assert not torch.equal(weight(other), weight(backend))


def test_scripted_logprobs_are_zero() -> None:
    backend = scripted()
    backend.keep_reference()
    assert not backend.logprobs(batch()).any()
    assert backend.reference_logprobs(batch()).shape == batch().tokens.shape


def test_scripted_restore_is_the_inverse_of_save(tmp_path: Path) -> None:
    backend, fresh = scripted(), scripted()
    for step in range(3):
        backend.train_step(batch(step))
    save_part(backend, tmp_path)
    fresh.restore(tmp_path)
    assert torch.equal(weight(fresh), weight(backend))
    with pytest.raises(SettingsError, match="not one of the scripted backend"):
        fresh.restore(tmp_path / "absent")
    backend.close()

"""Tests that checkpoints resume the oracle's critic, its warm-up, and the head that it takes over."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification

from protocol.errors import SettingsError
from tests.trainer.groups import whole
from tests.trainer.megatron.models import save_model
from tests.trainer.roles.ppo_steps import ALGORITHM, CRITIC, command, make_models
from trainer.algorithms import make_algorithm
from trainer.backends.base import NOTHING_TRAINED
from trainer.execution.commands import (
    FinishSaveCommand,
    OffloadCommand,
    OnloadCommand,
    RestoreCommand,
    SaveCommand,
)
from trainer.execution.executor import Executor
from trainer.reference.critic import ReferenceCritic
from trainer.roles.models import RankModels
from trainer.step.train_command import plan_command

RECIPE = make_algorithm(ALGORITHM)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen2-tied", tmp_path_factory.mktemp("model"))


def critic_of(models: RankModels) -> ReferenceCritic:
    assert isinstance(models.critic, ReferenceCritic)
    return models.critic


def weights_of(models: RankModels) -> dict[str, torch.Tensor]:
    both = {f"policy.{name}": tensor for name, tensor in models.policy.export()}
    both |= {f"critic.{name}": tensor.detach() for name, tensor in critic_of(models)._trained.items()}
    return {name: tensor.clone() for name, tensor in both.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_resumes_both_models_bit_for_bit(tiny: Path, tmp_path: Path, dtype: str) -> None:
    models = make_models("reference", tiny, dtype=dtype)
    leader = Executor(models)
    leader.train(command(2))
    leader.lead(SaveCommand(str(tmp_path)))
    assert leader.lead(FinishSaveCommand()) == {}
    expected = [leader.train(command(step))[1] for step in (3, 4)], weights_of(models)
    leader.close()
    fresh = make_models("reference", tiny, dtype=dtype)
    leader = Executor(fresh)
    leader.lead(RestoreCommand(str(tmp_path)))
    found = [leader.train(command(step))[1] for step in (3, 4)], weights_of(fresh)
    leader.close()
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])


def test_a_checkpoint_without_a_critic_is_refused_and_changes_nothing(tiny: Path, tmp_path: Path) -> None:
    models = make_models("reference", tiny)
    RankModels(models.policy).copy_state().write(tmp_path)
    before = weights_of(models)
    with pytest.raises(SettingsError, match="has no critic"):
        models.restore(tmp_path)
    after = weights_of(models)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_while_the_critic_warms_up_the_policy_stays(tiny: Path) -> None:
    models = make_models("reference", tiny, critic=replace(CRITIC, critic_warmup_steps=3))
    leader, before = Executor(models), weights_of(models)
    stats, after = leader.train(command(2))[1], weights_of(models)
    assert (stats.skipped, stats.loss, stats.grad_norm) == ("", None, None)
    assert stats.trained_tokens > 0
    assert stats.value_loss is not None
    changed = {name.partition(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"critic"}
    leader.train(command(3))
    last = weights_of(models)
    assert {n.partition(".")[0] for n in before if not torch.equal(last[n], after[n])} == {"critic", "policy"}


def test_a_step_of_the_warm_up_without_a_trained_token_is_skipped(tiny: Path) -> None:
    models = make_models("reference", tiny, critic=replace(CRITIC, critic_warmup_steps=10))
    leader, before = Executor(models), weights_of(models)
    stats = leader.train(msgspec.structs.replace(command(2), step=9))[1]  # all tokens are over the bound
    assert (stats.skipped, stats.updates, stats.updates_skipped) == (NOTHING_TRAINED, 0, 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(models).items())


def test_the_head_of_a_classifier_is_taken_over(tiny: Path, tmp_path: Path) -> None:
    classifier = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1)
    classifier.save_pretrained(tmp_path)
    models = make_models("reference", tiny, critic_dir=tmp_path)
    assert torch.equal(critic_of(models)._trained["score.weight"], classifier.score.weight)
    assert not critic_of(models)._trained["score.bias"].any()
    batch = whole(plan_command(command(2), RECIPE))
    values = critic_of(models).values(batch)
    with torch.no_grad():
        for first, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            ids = batch.tokens[first:end].long()[None]
            hidden = classifier.model(ids).last_hidden_state[0]
            wanted = torch.nn.functional.pad(classifier.score(hidden)[:-1, 0], (1, 0))
            wanted *= batch.sampled_mask[first:end]
            torch.testing.assert_close(values[first:end], wanted, atol=1e-6, rtol=0)


def test_a_head_of_several_labels_is_refused(tiny: Path, tmp_path: Path) -> None:
    for path in tiny.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file({"score.weight": torch.zeros(3, 64)}, tmp_path / "score.safetensors")
    with pytest.raises(
        SettingsError, match=r"score.weight .* has shape \(3, 64\), and a value head has one label"
    ):
        make_models("reference", tiny, critic_dir=tmp_path)


def test_offloaded_memory_comes_back_bit_for_bit(tiny: Path) -> None:
    models = make_models("reference", tiny)
    leader = Executor(models)
    leader.train(command(2))
    before = weights_of(models)
    leader.lead(OffloadCommand())
    assert critic_of(models)._trained["score.weight"].untyped_storage().nbytes() == 0
    leader.lead(OnloadCommand())
    after = weights_of(models)
    assert all(torch.equal(after[name], before[name]) for name in before)

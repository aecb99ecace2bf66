"""Tests what is found of a critic's model before a run starts."""

import json
from pathlib import Path

import pytest

from services.preflight.critic import critic_problems
from services.preflight.memory import workload_of
from services.preflight.model import read_model
from services.settings.load import load_settings
from services.settings.sections import Settings
from tests.data_sets import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


def copy_of(model: Path, directory: Path, **changes: object) -> Path:
    """The model with another config.json; None leaves a field out."""
    directory.mkdir()
    for path in model.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def settings(model: Path, *overrides: str) -> Settings:
    given = [f'model.path="{model}"', "algorithm.name=ppo", *overrides]
    return load_settings(overrides=given, environ={})


def found(given: Settings) -> list[str]:
    return [str(problem) for problem in critic_problems(given, read_model(given))]


def test_the_policys_own_model_is_a_critic(model: Path, tmp_path: Path) -> None:
    assert found(settings(model)) == []
    assert found(settings(model, f'critic.path="{copy_of(model, tmp_path / "other")}"')) == []


def test_a_critic_with_other_tokens_is_refused(model: Path, tmp_path: Path) -> None:
    other = copy_of(model, tmp_path / "other", vocab_size=5)
    (problem,) = found(settings(model, f'critic.path="{other}"'))
    assert f"setting critic.path = '{other}': it knows 5 tokens, and the policy's model has" in problem
    other = copy_of(model, tmp_path / "another")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    first, *_ = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"]["another"] = tokenizer["model"]["vocab"].pop(first)
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "its tokenizer differs from that of" in found(settings(model, f'critic.path="{other}"'))[0]


def test_a_critic_without_weights_or_config_is_refused(model: Path, tmp_path: Path) -> None:
    other = copy_of(model, tmp_path / "other")
    for path in other.glob("*.safetensors"):
        path.unlink()
    given = settings(model, f'critic.path="{other}"')
    (problem,) = found(given)
    assert "it holds no *.safetensors" in problem
    (other / "config.json").unlink()
    (problem,) = found(given)
    assert "setting critic.path: no config.json in" in problem


def test_a_critic_that_the_layout_does_not_divide_is_refused(model: Path, tmp_path: Path) -> None:
    other = copy_of(model, tmp_path / "other", num_hidden_layers=3)
    given = settings(model, f'critic.path="{other}"', "parallel.pipeline_model_parallel_size=2")
    (problem,) = found(given)
    assert "the critic: pipeline_model_parallel_size = 2 does not divide the model's 3 layers" in problem


def test_the_critic_is_part_of_the_expected_memory(model: Path) -> None:
    given = settings(model)
    work = workload_of(given, read_model(given))
    assert work.critic is not None
    assert (work.critic.value_head, work.critic.layers) == (True, work.architecture.layers)

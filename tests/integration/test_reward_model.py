"""Runs with a reward model in the trainer's ranks: its scores alone are learned, verified and repeated."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from services.run_record.steps import read_steps
from tests.integration.command import audit, tether, tether_here
from tests.integration.loop import ROOT
from tests.trainer.classifiers import save_classifier
from trainer.config import ScratchConfig
from trainer.random_model import build_scratch

STEPS = 12
OVERRIDES = (
    "engine.name=hf", "eval.at_end=false", "monitor.enabled=false", "trainer.checkpoint_every=2",
    'reward.verifiers=[{name="constant"}]', "bound.max_staleness=1",
)  # fmt: skip


def arguments(run_dir: Path, classifier: Path, steps: int, *more: str) -> list[str]:
    given = (*OVERRIDES, f'reward_model.path="{classifier}"', *more)
    words = [word for override in given for word in ("--set", override)]
    demo = str(ROOT / "deploy/configs/demo.toml")
    return ["up", demo, "--run-dir", str(run_dir), "--steps", str(steps), *words]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It likes some texts of the demo's tokens more than others."""
    root = tmp_path_factory.mktemp("models")
    model = build_scratch(ScratchConfig(num_hidden_layers=1, vocabulary="0123456789= "), root / "model")
    made = save_classifier(model, root / "classifier")
    for path in model.glob("tokenizer*"):
        shutil.copy(path, made / path.name)
    return made


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("placed", ["", "placement.reward_model=1"])
def test_the_scores_of_the_trainer_are_learned_and_repeated(
    placed: str, classifier: Path, tmp_path: Path
) -> None:
    run_dir, more = tmp_path / "run", (placed,) if placed else ()
    for steps in (STEPS // 2, STEPS):
        done = tether(*arguments(run_dir, classifier, steps, *more), seconds=300)
        assert done.returncode == 0, done.stdout + done.stderr
    assert audit(run_dir)["violations"] == []
    steps_made = read_steps(run_dir / "metrics.jsonl")
    scores = [step["reward_model_mean"] for step in steps_made]
    assert len(scores) == STEPS
    assert sum(scores[-3:]) > sum(scores[:3])
    assert {step["reward_mean"] for step in steps_made} == {0.0}  # the verifier's
    assert all(step["grad_norm"] > 0 for step in steps_made)
    replay = tether_here("replay", run_dir, "--step", STEPS - 1, "--train", "--json")
    assert replay.returncode == 0, replay.stdout + replay.stderr
    facts = json.loads(replay.stdout)
    assert (facts["equal"], facts["train"]["weights_equal"]) == (True, True)
    numerics = tether_here("verify", run_dir, "--numerics")
    assert numerics.returncode == 0, numerics.stdout + numerics.stderr


@pytest.mark.slow
def test_another_reward_model_does_not_continue_a_run(classifier: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(classifier, own)
    first = tether(*arguments(tmp_path / "run", own, 1), seconds=200)
    assert first.returncode == 0, first.stdout + first.stderr
    tensors = load_file(own / "model.safetensors")
    save_file(tensors | {"score.weight": -tensors["score.weight"]}, own / "model.safetensors")
    refused = tether(*arguments(tmp_path / "run", own, 2), seconds=200)
    assert refused.returncode == 2
    assert "setting reward_model.path: the model in" in refused.stderr

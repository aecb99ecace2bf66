"""Tests that PPO in every layout is that of the oracle, and that its checkpoints go from layout to layout."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.megatron.launch import launch
from tests.trainer.megatron.layouts import LAYOUTS
from tests.trainer.megatron.models import save_model
from tests.trainer.megatron.roles.critic_ranks import exported, measured, run
from tests.trainer.roles.ppo_steps import STEPS, command, make_models
from trainer.execution.commands import RestoreCommand
from trainer.execution.executor import Executor
from trainer.reference.critic import ReferenceCritic

pytestmark = pytest.mark.xdist_group("layouts")  # what `runs` sets up once, not one for each process

MODEL = "qwen2-tied"
ALWAYS = ("tp2", "pp2")
OTHERS = ("tp2-sequence", "cp2", "dp2", "tp2-dp2", "cp2-pp2")
EACH_LAYOUT = pytest.mark.parametrize(
    "layout", ["single", *ALWAYS, *(pytest.param(layout, marks=pytest.mark.slow) for layout in OTHERS)]
)


class Runs:
    """Results by layout, each launched once."""

    def __init__(self, root: Path) -> None:
        self.root, self.model_dir = root, save_model(MODEL, root)
        self._started: set[str] = set()

    def __call__(self, layout: str) -> Path:
        out = self.root / layout
        if layout not in self._started:
            self._started.add(layout)
            if layout == "single":
                run(layout, self.model_dir, out)
            else:
                moved = self("single") / "after-one"
                ranks = LAYOUTS[layout].world_size
                arguments = (layout, str(self.model_dir), str(out), str(moved))
                launch(
                    ranks,
                    "tests.trainer.megatron.roles.critic_ranks",
                    *arguments,
                    logs=self.root / f"l-{layout}",
                )
        return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("critic"))


@pytest.fixture(scope="module")
def oracle(runs: Runs) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    models = make_models("reference", runs.model_dir)
    leader = Executor(models)
    stats = [measured(leader.train(command(step))[1]) for step in STEPS]
    assert isinstance(models.critic, ReferenceCritic)
    weights = {f"policy.{name}": tensor for name, tensor in models.policy.export()}
    return stats, weights | {f"critic.{name}": tensor for name, tensor in models.critic._trained.items()}


@EACH_LAYOUT
def test_steps_equal_those_of_the_oracle(
    runs: Runs, oracle: tuple[list[dict[str, float]], dict[str, torch.Tensor]], layout: str
) -> None:
    expected_stats, expected = oracle
    found = json.loads((runs(layout) / "stats.json").read_text())
    for stats, wanted in zip(found, expected_stats, strict=True):
        assert stats == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    weights = load_file(runs(layout) / "after.safetensors")
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor.detach(), atol=2e-6, rtol=0, msg=name)


@EACH_LAYOUT
def test_continuing_from_a_checkpoint_is_bit_identical(runs: Runs, layout: str) -> None:
    assert_same_bits(runs(layout) / "after.safetensors", runs(layout) / "resumed.safetensors")


@pytest.mark.parametrize(
    "layout", [*ALWAYS, *(pytest.param(layout, marks=pytest.mark.slow) for layout in OTHERS)]
)
def test_a_checkpoint_goes_to_another_layout_and_back_bit_for_bit(
    runs: Runs, layout: str, tmp_path: Path
) -> None:
    moved, single = runs(layout) / "moved", runs("single")
    assert (moved / "critic" / "layout.json").read_text() != (
        single / "after-one" / "critic" / "layout.json"
    ).read_text()
    models = make_models("megatron", runs.model_dir)
    leader = Executor(models)
    leader.lead(RestoreCommand(str(moved)))
    for step in STEPS[1:]:
        leader.train(command(step))
    after = load_file(single / "after.safetensors")
    for name, tensor in exported(models):
        assert torch.equal(tensor, after[name]), name
    leader.close()


def assert_same_bits(left: Path, right: Path) -> None:
    a, b = load_file(left), load_file(right)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_the_head_of_a_classifier_is_taken_over(runs: Runs, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    classifier = AutoModelForSequenceClassification.from_pretrained(runs.model_dir, num_labels=1)
    classifier.save_pretrained(tmp_path)
    models = make_models("megatron", runs.model_dir, critic_dir=tmp_path)
    found = dict(exported(models))
    models.close()
    assert torch.equal(found["critic.score.weight"], classifier.score.weight)
    assert not found["critic.score.bias"].any()
    assert "critic.lm_head.weight" not in found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_train_on_float32_masters(
    runs: Runs, oracle: tuple[list[dict[str, float]], dict[str, torch.Tensor]], dtype: str
) -> None:
    models = make_models("megatron", runs.model_dir, dtype=dtype)
    leader = Executor(models)
    found = [leader.train(command(step))[1].value_loss for step in STEPS]
    head = dict(exported(models))["critic.score.weight"]
    leader.close()
    assert found == pytest.approx([stats["value_loss"] for stats in oracle[0]], rel=0.03)
    assert head.dtype is getattr(torch, dtype)
    torch.testing.assert_close(head.float(), oracle[1]["critic.score.weight"].detach(), atol=2e-3, rtol=0.02)

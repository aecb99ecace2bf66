"""Tests which version is the best one, and what is kept of it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from protocol.messages import WeightManifest
from protocol.weights.lora import LoraConfig
from services.evaluation.best import BestCheckpoint, best_of
from services.observability.evaluations import BEST, SNAPSHOTS, Evaluation, append_evaluation
from services.settings.evaluation import BestScore
from services.settings.sections import ModelConfig, RunConfig, Settings
from trainer.config import ScratchConfig, WeightConfig
from trainer.random_model import build_scratch
from trainer.weights.disk import DiskSender

GREEDY = BestScore("held_out", "greedy")
TINY = ScratchConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)


def scored(version: int, greedy: float | None, set_: str = "held_out", **fields: object) -> Evaluation:
    return Evaluation(version=version, step=version - 1, set=set_, n=8, greedy=greedy, **fields)  # type: ignore[arg-type]


def test_best_is_the_highest_score_and_the_earliest_of_equal_ones() -> None:
    rows = [scored(0, 0.1), scored(2, 0.5), scored(4, 0.5), scored(6, 0.9, "other"), scored(8, None)]
    assert best_of(rows, GREEDY) is rows[1]
    assert best_of(rows, BestScore("other", "greedy")) is rows[3]
    assert best_of(rows[4:], GREEDY) is None


def test_best_by_pass_at_k_reads_that_score() -> None:
    rows = [
        scored(0, 0.9, pass_at_k={1: 0.2, 2: 0.3}),
        scored(2, 0.1, pass_at_k={1: 0.1, 2: 0.4}),
    ]
    assert best_of(rows, BestScore("held_out", "pass@2")) is rows[1]
    assert best_of(rows, BestScore("held_out", "pass@4")) is None


class Rig:
    """A run directory with a model, and snapshots of tensors that a test chooses."""

    def __init__(self, run_dir: Path, lora: LoraConfig) -> None:
        self.run_dir = run_dir
        model = run_dir / "model"
        build_scratch(TINY, model)
        self.settings = Settings(
            run=RunConfig(dir=str(run_dir)), model=ModelConfig(path=str(model)), lora=lora
        )
        self.model = load_file(model / "model.safetensors")
        self.best = BestCheckpoint(self.settings, GREEDY)

    def evaluate(self, version: int, score: float, tensors: dict[str, torch.Tensor]) -> None:
        """Do what the evaluator does with a score."""
        evaluation = scored(version, score)
        self.best.keep(evaluation, self.snapshot(version, tensors))
        append_evaluation(self.run_dir, evaluation)
        self.best.publish()

    def snapshot(self, version: int, tensors: dict[str, torch.Tensor]) -> WeightManifest:
        sender = DiskSender(WeightConfig(directory=str(self.run_dir / SNAPSHOTS)), self.run_dir)
        return sender.publish("e1", version, tensors.items())

    def kept(self) -> dict[str, torch.Tensor]:
        return load_file(self.run_dir / "exports/best/model.safetensors")


def test_best_checkpoint_follows_the_score(tmp_path: Path) -> None:
    rig = Rig(tmp_path, LoraConfig())
    for version, score in ((0, 0.2), (2, 0.6), (4, 0.4)):
        rig.evaluate(version, score, {name: t + version for name, t in rig.model.items()})
    assert all(torch.equal(rig.kept()[name], t + 2) for name, t in rig.model.items())
    assert (tmp_path / "exports/best").readlink() == Path("best_step_00000002")
    assert sorted(path.name for path in (tmp_path / "exports").iterdir()) == [
        "best", "best.json", "best_step_00000002",
    ]  # fmt: skip
    facts = json.loads((tmp_path / BEST).read_text())
    assert (facts["version"], facts["set"], facts["metric"], facts["score"]) == (2, "held_out", "greedy", 0.6)
    assert (tmp_path / "exports/best/config.json").is_file()


def test_death_between_model_and_line_keeps_the_best_before(tmp_path: Path) -> None:
    rig = Rig(tmp_path, LoraConfig())
    rig.evaluate(0, 0.2, rig.model)
    better = {name: t + 2 for name, t in rig.model.items()}
    rig.best.keep(scored(2, 0.6), rig.snapshot(2, better))  # and dies here
    BestCheckpoint(rig.settings, GREEDY).publish()
    assert torch.equal(rig.kept()["model.norm.weight"], rig.model["model.norm.weight"])
    rig.evaluate(2, 0.6, better)
    assert torch.equal(rig.kept()["model.norm.weight"], better["model.norm.weight"])


def test_adapters_are_kept_merged_and_as_peft_does(tmp_path: Path) -> None:
    lora = LoraConfig(rank=2, alpha=8.0, target_modules=("q_proj",))
    rig = Rig(tmp_path, lora)
    name = "model.layers.0.self_attn.q_proj"
    weight = rig.model[f"{name}.weight"]
    a, b = torch.randn(2, weight.shape[1]), torch.randn(weight.shape[0], 2)
    published = {
        f"base_model.model.{name}.lora_A.weight": a,
        f"base_model.model.{name}.lora_B.weight": b,  # published scaled
    }
    rig.evaluate(2, 0.6, published)
    torch.testing.assert_close(rig.kept()[f"{name}.weight"], weight + b @ a)
    adapter = load_file(tmp_path / "exports/adapter_best/adapter_model.safetensors")
    config = json.loads((tmp_path / "exports/adapter_best/adapter_config.json").read_text())
    assert config["lora_alpha"] / config["r"] == 1
    assert all(torch.equal(adapter[key], tensor) for key, tensor in published.items())


def test_model_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(tmp_path, LoraConfig())
    rig.evaluate(0, 0.2, rig.model)
    manifest = rig.snapshot(2, rig.model)
    (Path(manifest.location) / "model.safetensors").write_bytes(b"torn")
    rig.best.keep(scored(2, 0.9), manifest)
    append_evaluation(tmp_path, scored(2, 0.9))
    rig.best.publish()
    assert (tmp_path / "exports/best").readlink() == Path("best_step_00000000")
    assert "best.failed version=2" in caplog.text

"""Tests which version is the best one, and what is kept of it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from protocol.messages import WeightManifest
from protocol.weights.lora import LoraConfig
from services.evaluation.best import BestCheckpoint, best_of
from services.run_record.evaluations import BEST, SNAPSHOTS, Evaluation, append_evaluation
from services.run_record.steps import StepLog
from services.settings.evaluation import BestScore
from services.settings.sections import ModelConfig, RunConfig, Settings
from tests.services.run_record.test_steps import report
from trainer.config import ScratchConfig, WeightConfig
from trainer.random_model import build_scratch
from trainer.weights.files import disk_sender

GREEDY = BestScore("held_out", "greedy")
TINY = ScratchConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)


def scored(version: int, greedy: float | None, set_: str = "held_out", **fields: object) -> Evaluation:
    return Evaluation(version=version, step=version - 1, set=set_, n=8, greedy=greedy, **fields)  # type: ignore[arg-type]


def test_best_is_the_highest_score_and_the_earliest_of_equal_ones() -> None:
    rows = [scored(0, 0.1), scored(2, 0.5), scored(4, 0.5), scored(6, 0.9, "other"), scored(8, None)]
    assert best_of(rows, GREEDY) is rows[1]
    assert best_of(rows, BestScore("other", "greedy")) is rows[3]
    assert best_of(rows[4:], GREEDY) is None


def test_a_version_that_was_scored_again_has_its_later_score() -> None:
    rows = [scored(40, 0.9), scored(20, 0.4), scored(40, 0.5), scored(50, 0.6)]
    assert best_of(rows, GREEDY) is rows[3]
    assert best_of(rows[:3], GREEDY) is rows[2]


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

    def evaluate(
        self, version: int, score: float, tensors: dict[str, torch.Tensor], epoch: str = "e1"
    ) -> str:
        """Do what the evaluator does with a score; returns the name that its directory has or would have."""
        evaluation = self.keep(version, score, tensors, epoch)
        append_evaluation(self.run_dir, evaluation)
        self.best.publish()
        return f"best_step_{version:08d}-{evaluation.digest}"

    def keep(
        self, version: int, score: float, tensors: dict[str, torch.Tensor], epoch: str = "e1"
    ) -> Evaluation:
        """Do what the evaluator does with a score before it writes the line, which is returned."""
        manifest = self.snapshot(version, tensors, epoch)
        evaluation = scored(version, score, digest=f"{manifest.digest:016x}", epoch=epoch)
        self.best.keep(evaluation, manifest)
        return evaluation

    def snapshot(self, version: int, tensors: dict[str, torch.Tensor], epoch: str = "e1") -> WeightManifest:
        sender = disk_sender(WeightConfig(directory=str(self.run_dir / SNAPSHOTS)), self.run_dir)
        return sender.publish(epoch, version, tensors.items())

    def moved(self, by: float) -> dict[str, torch.Tensor]:
        """Return other weights of the model."""
        return {name: tensor + by for name, tensor in self.model.items()}

    def holds(self, by: float, name: str) -> bool:
        """Return whether `best` links to this directory and has these weights."""
        is_it = (self.run_dir / "exports/best").readlink() == Path(name)
        return is_it and all(torch.equal(self.kept()[key], t) for key, t in self.moved(by).items())

    def kept(self) -> dict[str, torch.Tensor]:
        return load_file(self.run_dir / "exports/best/model.safetensors")


def test_best_checkpoint_follows_the_score(tmp_path: Path) -> None:
    rig = Rig(tmp_path, LoraConfig())
    _, name, _ = (rig.evaluate(v, score, rig.moved(v)) for v, score in ((0, 0.2), (2, 0.6), (4, 0.4)))
    assert rig.holds(2, name)
    assert sorted(path.name for path in (tmp_path / "exports").iterdir()) == ["best", "best.json", name]
    facts = json.loads((tmp_path / BEST).read_text())
    assert (facts["version"], facts["set"], facts["metric"], facts["score"]) == (2, "held_out", "greedy", 0.6)
    assert (tmp_path / "exports/best/config.json").is_file()


def test_after_a_rewind_the_score_of_the_abandoned_weights_does_not_count(tmp_path: Path) -> None:
    """Nothing but eval.jsonl says so here: version 40 was scored again with other weights."""
    rig = Rig(tmp_path, LoraConfig())
    rig.evaluate(20, 0.7, rig.moved(0))
    abandoned = rig.evaluate(40, 0.9, rig.moved(1))
    name = rig.evaluate(40, 0.5, rig.moved(2), "e2")
    assert name != abandoned
    assert rig.holds(2, name)  # the weights of version 20 are gone
    rig.evaluate(45, 0.4, rig.moved(3), "e2")
    assert rig.holds(2, name)
    name = rig.evaluate(50, 0.6, rig.moved(4), "e2")
    assert rig.holds(4, name)
    assert json.loads((tmp_path / BEST).read_text())["version"] == 50
    assert sorted(path.name for path in (tmp_path / "exports").iterdir()) == ["best", "best.json", name]


def test_a_directory_of_superseded_weights_is_not_linked_by_its_version(tmp_path: Path) -> None:
    rig = Rig(tmp_path, LoraConfig())
    before = rig.evaluate(20, 0.7, rig.moved(0))
    rig.keep(40, 0.9, rig.moved(1))  # and dies here, before the line
    append_evaluation(tmp_path, scored(40, 0.8, digest="f" * 16, epoch="e2"))
    rig.best.publish()
    assert rig.holds(0, before)


def test_versions_beyond_the_rewind_are_left_for_the_first_that_is_scored_after_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, LoraConfig())
    steps = StepLog(tmp_path / "metrics.jsonl")
    steps.append(report(44, "e1"))
    abandoned = rig.evaluate(45, 0.95, rig.moved(1))
    steps.append(report(30, "e2"))
    rig.best.publish()
    assert rig.holds(1, abandoned)  # there is no other
    name = rig.evaluate(35, 0.2, rig.moved(2), "e2")
    assert rig.holds(2, name)


def test_death_between_model_and_line_keeps_the_best_before(tmp_path: Path) -> None:
    rig = Rig(tmp_path, LoraConfig())
    rig.evaluate(0, 0.2, rig.model)
    better = {name: t + 2 for name, t in rig.model.items()}
    rig.keep(2, 0.6, better)  # and dies here
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
    before = rig.evaluate(0, 0.2, rig.model)
    manifest = rig.snapshot(2, rig.moved(2))
    (Path(manifest.location) / "bucket_00000.bin").write_bytes(b"torn")
    unwritten = scored(2, 0.9, digest=f"{manifest.digest:016x}")
    rig.best.keep(unwritten, manifest)
    append_evaluation(tmp_path, unwritten)
    rig.best.publish()
    assert rig.holds(0, before)
    assert "best.failed version=2" in caplog.text
    assert rig.holds(4, rig.evaluate(4, 0.5, rig.moved(4)))  # the best one that is there

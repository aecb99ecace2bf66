"""Tests that steps of several updates equal a plain loop over Hugging Face, in every layout."""

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.measured import flat
from tests.trainer.megatron.launch import launch
from tests.trainer.step.plain_updates import RECIPES, STEPS, PlainLoop, command
from tests.trainer.step.update_ranks import LAYOUTS, models
from trainer.execution.executor import Executor
from trainer.functional.entropy_target import EntropyBonus

SLOW = [layout for layout in LAYOUTS if layout != "data"]
COMPARED = ("trained_tokens", "entropy", "grad_norm", "importance_ess", "ratio_mean", "updates", "loss")


def assert_close(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("backend", ["reference", "megatron"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_updates_equal_a_plain_loop(model_dir: Path, recipe: str, backend: str) -> None:
    leader = Executor(models(model_dir, recipe, backend))
    before = {name: tensor.clone() for name, tensor in leader.models.policy.export()}
    loop = PlainLoop(model_dir, recipe)
    for step in range(STEPS):
        stats, wanted = leader.train(command(recipe, step))[1], loop.step(command(recipe, step))
        assert (stats.updates, stats.updates_skipped, stats.skipped) == (6, 0, "")
        assert {name: getattr(stats, name) for name in wanted} == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    found = {name: tensor.clone() for name, tensor in leader.models.policy.export()}
    leader.close()
    assert_close(found, loop.weights())
    assert any((found[name] - tensor).abs().max() > 1e-3 for name, tensor in before.items())


@pytest.mark.parametrize("layout", ["data", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
@pytest.mark.xdist_group("layouts")  # one process forks the ranks of all
def test_every_layout_makes_the_same_updates(model_dir: Path, tmp_path: Path, layout: str) -> None:
    arguments = (layout, str(model_dir), str(tmp_path))
    launch(2, "tests.trainer.step.update_ranks", *arguments, logs=tmp_path / "logs", deadline_s=400)
    for recipe in RECIPES:
        leader = Executor(models(model_dir, recipe, "reference"))
        wanted = [flat(leader.train(command(recipe, step))[1]) for step in range(STEPS)]
        assert_close(load_file(tmp_path / f"{recipe}.safetensors"), dict(leader.models.policy.export()))
        found = json.loads((tmp_path / f"{recipe}.json").read_text())
        for ours, theirs in zip(found, wanted, strict=True):
            assert {name: ours[name] for name in COMPARED} == pytest.approx(
                {name: theirs[name] for name in COMPARED}, rel=1e-3, abs=1e-5
            )
            assert ours.keys() == theirs.keys()


def test_a_step_continues_bit_for_bit_from_a_checkpoint(model_dir: Path, tmp_path: Path) -> None:
    recipe = "decoupled"
    first, second = (models(model_dir, recipe, "reference") for _ in range(2))
    leader, resumed = (Executor(rank) for rank in (first, second))
    for step in range(2):
        leader.train(command(recipe, step))
    first.copy_state().write(tmp_path)
    second.restore(tmp_path)
    assert first.entropy is not None
    assert second.entropy is not None
    assert second.entropy.bonus == first.entropy.bonus != EntropyBonus.first(RECIPES[recipe])
    one, other = (rank.train(command(recipe, 2))[1] for rank in (leader, resumed))
    assert one == other
    assert all(
        torch.equal(a, b)
        for (_, a), (_, b) in zip(leader.models.policy.export(), resumed.models.policy.export(), strict=True)
    )


def test_a_mini_batch_without_trained_tokens_is_a_skipped_update(model_dir: Path) -> None:
    leader = Executor(models(model_dir, "m2po", "reference"))
    made = command("m2po", 0, epochs=1, mini_batches=12)
    plan, stats = leader.train(msgspec.structs.replace(made, bounds=[0] * 4))
    empty = sum(not totals.trained_tokens for totals in plan.mini_batches.totals)
    assert 0 < empty < 12
    assert (stats.updates, stats.updates_skipped, stats.skipped) == (12 - empty, empty, "")
    assert stats.trained_tokens == plan.totals.trained_tokens
    assert f"{empty} of 12 updates were skipped" in stats.warnings[0]
    _, late = leader.train(msgspec.structs.replace(made, bounds=[0] * 4, step=20))
    assert (late.updates, late.updates_skipped) == (0, 12)
    assert "within the bound" in late.skipped

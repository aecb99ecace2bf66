"""Tests that steps of several updates equal a plain loop over Hugging Face, in every layout."""

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from tests.changes import slow_unless_changed
from tests.trainer.groups import GroupSpec, SampleSpec, batch_of, scored
from tests.trainer.measured import flat
from tests.trainer.megatron.launch import launch
from tests.trainer.step.plain_updates import RECIPES, STEPS, PlainLoop, command
from tests.trainer.step.update_ranks import LAYOUTS, models
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.backends.base import NOTHING_TRAINED, StepStats
from trainer.batch import StepTotals, trained_tokens
from trainer.execution.executor import Executor
from trainer.roles.entropy import EntropyBonus
from trainer.step.loss import micro_batch_loss
from trainer.step.measures import StepMeasures
from trainer.step.train_command import UpdateSchedule
from trainer.step.update import merged_updates

ALWAYS = {"decoupled": "reference", "m2po": "megatron", "interpolated": "reference"}
"""Recipe -> backend in which every run of the tests makes its updates."""
CHANGED = slow_unless_changed(
    "trainer/step/", "trainer/reference/", "trainer/megatron/", "trainer/algorithms/", "trainer/functional/",
    "trainer/roles/", "trainer/optimizers/", "tests/trainer/step/",
)  # fmt: skip
SLOW = [layout for layout in LAYOUTS if layout != "data"]
COMPARED = ("trained_tokens", "entropy", "grad_norm", "importance_ess", "ratio_mean", "updates", "loss")


def assert_close(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        pytest.param(recipe, backend, marks=[] if ALWAYS[recipe] == backend else CHANGED)
        for recipe in RECIPES
        for backend in ("reference", "megatron")
    ],
)
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


CONFIG = AlgorithmConfig()
TOTALS = (StepTotals(1, 2, 1, True), StepTotals(1, 3, 1, False))


def update(logprobs: list[float], versions: list[int], totals: StepTotals, **numbers: float) -> StepStats:
    """One sample in step 1, which the engine gave log-probabilities of -1."""
    spec = GroupSpec(samples=[SampleSpec([5] * len(logprobs), versions)])
    batch = batch_of([(scored(spec), 1)], step=1, algorithm=make_algorithm(CONFIG))
    batch = batch.select_mini_batch(0, totals)
    measures, tokens = StepMeasures.of_batch(batch, CONFIG), trained_tokens(batch)
    values = tokens.behaviour_logprobs.new_tensor(logprobs)
    vector = micro_batch_loss(make_algorithm(CONFIG), measures, tokens, values, -values)[1]
    stats = measures.stats(vector, grad_norm=numbers.get("grad_norm", 1.0), skipped="")
    return msgspec.structs.replace(stats, **numbers)


FIRST = update([-1.0, -0.5], [1, 1], TOTALS[0], micro_batches=2, memory_peak_gb=1.0, loss=1.0)
SECOND = update([-1.0, -1.0, -3.0], [0, 0, 0], TOTALS[1], micro_batches=3, memory_peak_gb=3.0, loss=3.0)


def test_one_update_is_reported_as_it_is() -> None:
    merged = merged_updates(CONFIG, [FIRST], UpdateSchedule(False))
    assert merged.updates == 1
    assert merged.loss == FIRST.loss
    assert merged.mismatch == FIRST.mismatch


def test_means_are_over_tokens_maxima_over_updates_and_counts_are_sums() -> None:
    known = UpdateSchedule(False, updates=(0, 1), mini_batches=TOTALS, start_logprobs=True)
    merged = merged_updates(CONFIG, [FIRST, SECOND], known)
    assert merged.trained_tokens == 5
    assert (merged.updates, merged.updates_skipped) == (2, 0)
    assert merged.entropy == pytest.approx((1 + 0.5 + 1 + 1 + 3) / 5)
    assert (merged.loss, merged.micro_batches, merged.memory_peak_gb) == (2.0, 5, 3.0)
    assert merged.mismatch.keys() == {0, 1}
    assert merged.mismatch[1].tokens == 3
    assert merged.mismatch[1].error_max == pytest.approx(2.0)
    assert merged.importance_max == pytest.approx(2.718281828**0.5)


def test_tokens_are_compared_with_the_engine_under_the_policy_at_the_start_alone() -> None:
    unknown = UpdateSchedule(False, updates=(0, 1), mini_batches=TOTALS)
    merged = merged_updates(CONFIG, [FIRST, SECOND], unknown)
    assert merged.mismatch == FIRST.mismatch
    assert merged.importance_mean == FIRST.importance_mean
    assert merged.entropy == pytest.approx((1 + 0.5 + 1 + 1 + 3) / 5)


def test_tokens_are_compared_in_the_first_update_that_has_any() -> None:
    """The first mini-batch trains nothing, so the second starts from the same weights."""
    nothing = StepTotals(1, 0, 1, False)
    empty = StepStats(trained_tokens=0, skipped=NOTHING_TRAINED)
    totals = (nothing, *TOTALS)
    merged = merged_updates(
        CONFIG, [empty, FIRST, SECOND], UpdateSchedule(False, updates=(0, 1, 2), mini_batches=totals)
    )
    assert merged.mismatch == FIRST.mismatch
    assert merged.token_mult_prob_error == FIRST.token_mult_prob_error
    assert merged.logprob_error_max == 0.5
    assert merged.importance_mean == FIRST.importance_mean


def test_a_second_epoch_counts_no_token_twice() -> None:
    twice = UpdateSchedule(False, updates=(0, 1, 1, 0), mini_batches=TOTALS, start_logprobs=True)
    merged = merged_updates(CONFIG, [FIRST, SECOND, SECOND, FIRST], twice)
    assert merged.trained_tokens == 5
    assert sum(found.tokens for found in merged.mismatch.values()) == 5


def test_skipped_updates_are_reported_and_a_step_is_skipped_if_all_are() -> None:
    failed = StepStats(trained_tokens=3, skipped="the gradient's norm is nan")
    both = UpdateSchedule(False, updates=(0, 1), mini_batches=TOTALS, start_logprobs=True)
    merged = merged_updates(CONFIG, [FIRST, failed], both)
    assert (merged.skipped, merged.updates, merged.updates_skipped) == ("", 1, 1)
    assert merged.warnings == (
        "1 of 2 updates were skipped, the last one because the gradient's norm is nan",
    )
    merged = merged_updates(CONFIG, [failed, failed], both)
    assert (merged.skipped, merged.updates, merged.warnings) == ("the gradient's norm is nan", 0, ())

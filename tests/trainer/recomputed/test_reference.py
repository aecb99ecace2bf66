"""Every recipe in the reference backend is what a naive loop over Hugging Face computes, to 1e-6."""

from pathlib import Path

import pytest

from tests.changes import slow_unless_changed
from tests.trainer.algorithms.naive import mean, of_samples
from tests.trainer.recomputed.backend_run import (
    assert_equal,
    differences,
    make_models,
    run_case,
    weights_of,
)
from tests.trainer.recomputed.cases import (
    BOUND,
    CASES,
    FIRST,
    STEPS,
    WITHOUT_TOKENS,
    recomputed,
    records,
)
from tests.trainer.recomputed.records import read
from trainer.algorithms.registry import ALGORITHMS

FEW = ("grpo", "ppo-kl-in-reward", "branches-ppo", "reward-model")
CHANGED = slow_unless_changed(
    "trainer/reference/", "trainer/layers/", "trainer/functional/", "trainer/algorithms/", "trainer/roles/",
    "trainer/step/", "trainer/data/", "tests/trainer/recomputed/",
)  # fmt: skip

pytestmark = pytest.mark.xdist_group("layouts")  # what naive loops compute is there once


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else [CHANGED]) for name in CASES]
)
def test_three_steps_are_those_of_the_naive_loop(name: str, directory: Path) -> None:
    expected, weights = recomputed(name, directory)
    models = make_models("reference", CASES[name], directory)
    found = run_case(models, CASES[name], directory)
    assert_equal(found, expected)
    assert max(differences(weights_of(models).items(), weights).values()) < 1e-6


def test_the_records_have_what_is_hard(directory: Path) -> None:
    lags, untrained, inserted = set(), 0, 0
    for step, groups in enumerate(records(directory)):
        batch = read(groups, FIRST + step, CASES["grpo"].config, decoupled=False)
        lags |= {int(lag) for lag in (batch.step - batch.versions[batch.loss_mask])}
        untrained += [not tokens for tokens in batch.trained].count(True)
        inserted += int((~batch.sampled_mask & (batch.versions >= 0)).sum())
        assert batch.loss_mask.any() == (step != WITHOUT_TOKENS)
        assert len(set(batch.rewards[batch.group_index == 1].tolist())) == 1
        assert len(set(batch.rewards[batch.group_index == 0].tolist())) > 1
        late = batch.sampled_mask & (batch.step - batch.versions > BOUND)
        assert late.any()
    assert lags == {0, 1, 2}
    assert untrained >= STEPS
    assert inserted


def test_the_branches_have_what_is_hard(directory: Path) -> None:
    """Rows that share nothing with the one before, a part of it, or more than it has of its own."""
    of_parent, untrained = set(), 0
    for step, groups in enumerate(records(directory, True)):
        for scored, _ in groups:
            rows = scored.rollout.branches.numpy().tolist()
            lengths = scored.rollout.lengths.numpy().tolist()
            assert len({sample for sample, _, _ in rows}) == 4 < len(rows)
            for _, parent, shared in rows:
                if parent >= 0:
                    inherited = rows[parent][2]
                    of_parent.add(
                        (shared > 0) + (shared > inherited) + (shared == inherited + lengths[parent])
                    )
        batch = read(groups, FIRST + step, CASES["branches"].config, decoupled=False)
        owners = batch.rows.tolist()
        trained = {owner for owner, tokens in zip(owners, batch.trained, strict=True) if tokens}
        untrained += sum(
            not tokens and owner in trained for owner, tokens in zip(owners, batch.trained, strict=True)
        )
    assert of_parent >= {0, 2, 3}
    assert untrained


@CHANGED
def test_the_cases_use_what_they_test(directory: Path) -> None:
    assert {case.config.name for case in CASES.values()} == ALGORITHMS.keys()
    for name, case in CASES.items():
        first, *_, last = recomputed(name, directory)[0]
        assert first["grad_norm"] > 0
        if case.config.rejection_level:
            assert 0 < first["importance_rejected"] < 1
        if case.decoupled and 0 < case.config.importance_cap < 2:
            assert 0 < first["importance_capped"] < 1
        if not case.decoupled and name != "sft":
            assert 0 < first["clip_fraction"] < 1
        if case.has_critic:
            assert first["value_mean"] == 0 or case.epochs > 1
            assert last["value_mean"] != 0
            assert (last["value_clip_fraction"] > 0) == (case.epochs > 1)  # none has moved before the first
        if case.config.truncated == "mask":
            assert first["truncated_tokens"] > 0
        if case.config.truncated == "shape":
            assert first["shaped_reward_mean"] < naive_mean_reward(directory, case.branched)
        if case.config.use_kl_in_reward:
            assert first["reward_kl_k1"]
        if "teacher" in case.frozen:
            assert first["teacher_kl_k1"]


def naive_mean_reward(directory: Path, branched: bool) -> float:
    batch = read(records(directory, branched)[0], FIRST, CASES["grpo"].config, decoupled=False)
    return mean(of_samples(batch, batch.rewards.tolist()))

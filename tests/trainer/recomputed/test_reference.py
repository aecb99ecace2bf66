"""Every recipe in the reference backend is what a naive loop over Hugging Face computes, to 1e-6."""

from pathlib import Path

import pytest

from tests.trainer.recomputed.backend_run import assert_equal, differences, run_case
from tests.trainer.recomputed.cases import (
    BOUND,
    CASES,
    FIRST,
    OPTIMIZER,
    STEPS,
    WITHOUT_TOKENS,
    model_dir,
    recomputed,
    records,
)
from tests.trainer.recomputed.loop import read
from trainer.config import TrainerConfig
from trainer.reference.backend import ReferenceBackend


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_dir(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", CASES)
def test_three_steps_are_those_of_the_naive_loop(name: str, directory: Path) -> None:
    expected, weights = recomputed(name, directory)
    backend = ReferenceBackend(
        directory,
        optimizer=OPTIMIZER,
        trainer=TrainerConfig(backend="reference", micro_batch_size=5, device="cpu"),
        algorithm=CASES[name].made(),
    )
    found = run_case(backend, CASES[name], directory)
    assert_equal(found, expected)
    assert max(differences(backend.export(), weights).values()) < 1e-6


def test_the_records_have_what_is_hard(directory: Path) -> None:
    lags, untrained, inserted = set(), 0, 0
    for step, groups in enumerate(records(directory)):
        batch = read(groups, FIRST + step, decoupled=False)
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


def test_the_cases_use_what_they_test(directory: Path) -> None:
    for name, case in CASES.items():
        first = recomputed(name, directory)[0][0]
        assert first["grad_norm"] > 0
        if case.config.rejection_level or case.config.second_moment_threshold:
            assert 0 < first["importance_rejected"] < 1
        if case.decoupled and 0 < case.config.importance_cap < 2:
            assert 0 < first["importance_capped"] < 1
        if not case.decoupled and name != "m2po":
            assert 0 < first["clip_fraction"] < 1

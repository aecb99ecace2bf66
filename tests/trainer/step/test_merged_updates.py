"""Tests what a step of several updates reports, by hand."""

import pytest

from tests.trainer.groups import GroupSpec, SampleSpec, batch_of, scored
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.backends.base import NOTHING_TRAINED, StepStats
from trainer.batch import StepTotals, trained_tokens
from trainer.step.measures import StepMeasures
from trainer.step.merged_updates import merged_updates
from trainer.step.token_loss import micro_batch_loss
from trainer.step.train_command import UpdateSchedule

CONFIG = AlgorithmConfig()
TOTALS = (StepTotals(1, 2, 1, True), StepTotals(1, 3, 1, False))


def update(logprobs: list[float], versions: list[int], totals: StepTotals, **numbers: float) -> StepStats:
    """One sample in step 1, which the engine gave log-probabilities of -1."""
    spec = GroupSpec(samples=[SampleSpec([5] * len(logprobs), versions)])
    batch = batch_of([(scored(spec), 1)], step=1, algorithm=make_algorithm(CONFIG))
    batch = batch.of_mini_batch(0, totals)
    measures, tokens = StepMeasures.of_batch(batch, CONFIG), trained_tokens(batch)
    values = tokens.behaviour_logprobs.new_tensor(logprobs)
    vector = micro_batch_loss(make_algorithm(CONFIG), measures, tokens, values, -values)[1]
    stats = measures.stats(vector, grad_norm=numbers.get("grad_norm", 1.0), skipped="")
    return StepStats(**{**{name: getattr(stats, name) for name in StepStats.__slots__}, **numbers})


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

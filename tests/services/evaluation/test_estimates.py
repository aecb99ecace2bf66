"""Tests means, standard errors and pass@k against numpy, closed forms and enumeration."""

import itertools
import math

import numpy as np
import pytest

from services.evaluation.estimates import (
    PromptScore,
    greedy_fields,
    mean_and_stderr,
    paired_difference,
    pass_at_k,
    sampled_fields,
)


def test_mean_and_stderr_are_those_of_numpy() -> None:
    values = np.random.RandomState(0).normal(3, 2, 57)
    mean, stderr = mean_and_stderr(values.tolist())
    assert mean == pytest.approx(values.mean(), rel=1e-12)
    assert stderr == pytest.approx(values.std(ddof=1) / math.sqrt(57), rel=1e-12)


def test_stderr_of_a_share_is_the_closed_form() -> None:
    mean, stderr = mean_and_stderr([1.0] * 30 + [0.0] * 70)
    assert mean == pytest.approx(0.3)
    assert stderr == pytest.approx(math.sqrt(0.3 * 0.7 / 99))


def test_unmeasured_estimate_is_none() -> None:
    assert mean_and_stderr([]) == (None, None)
    assert mean_and_stderr([0.5]) == (0.5, None)


@pytest.mark.parametrize(
    ("n", "right", "k"), [(1, 1, 1), (4, 0, 4), (5, 2, 3), (6, 3, 4), (8, 1, 2), (7, 7, 4)]
)
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n: int, right: int, k: int) -> None:
    answers = [True] * right + [False] * (n - right)
    subsets = [any(subset) for subset in itertools.combinations(answers, k)]
    assert pass_at_k(n, right, k) == pytest.approx(sum(subsets) / len(subsets))


def test_pass_at_k_is_exact_for_many_samples() -> None:
    product = 1 - float(np.prod(1 - 64 / np.arange(4096 - 3 + 1, 4096 + 1)))  # the paper's own form
    assert pass_at_k(4096, 3, 64) == pytest.approx(product, rel=1e-12)
    assert pass_at_k(8, 4, 1) == 0.5


def test_sampled_scores_are_means_over_prompts() -> None:
    scores = [
        PromptScore((1.0, 0.0, 0.0, 0.0), (2, 4, 4, 4), (False, True, True, True)),
        PromptScore((1.0, 1.0, 1.0, 0.9999999), (1, 1, 1, 1), (False,) * 4),
        PromptScore(error="prompt 2: no score"),
    ]
    fields = sampled_fields(scores, [1, 2, 4], success=1.0)
    assert fields["sampled"] == pytest.approx(0.625)
    assert fields["sampled_stderr"] == pytest.approx(0.375)  # of the prompts' means, not of eight samples
    assert fields["pass_at_k"] == pytest.approx({1: 0.625, 2: (0.5 + 1) / 2, 4: 1.0})
    assert fields["pass_at_k_stderr"][4] == 0.0
    assert fields["sampled_length"] == pytest.approx(18 / 8)
    assert fields["sampled_truncated"] == pytest.approx(3 / 8)


def test_prompts_without_a_score_are_in_no_mean() -> None:
    scored = PromptScore((1.0,), (3,), (True,), tokens=2, seconds=0.5)
    fields = greedy_fields([scored, PromptScore(error="broken")])
    assert fields == {
        "greedy": 1.0, "greedy_stderr": None, "length": 3.0, "truncated": 1.0, "tokens": 2.0, "prompt_s": 0.5
    }  # fmt: skip
    assert greedy_fields([PromptScore(error="broken")])["greedy"] is None
    assert sampled_fields([PromptScore(error="broken")], [1], 1.0)["pass_at_k"] == {}


def test_paired_difference_is_the_mean_and_its_standard_error() -> None:
    mean, stderr = paired_difference([1.0, 3.0, 2.0], [0.0, 1.0, 2.0])
    assert mean == pytest.approx(1.0)
    assert stderr == pytest.approx((1.0 / 3) ** 0.5)  # differences 1, 2, 0: variance 1

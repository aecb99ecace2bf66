"""Combining scores into rewards."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.combine import VerifierError, combine

FINITE = st.floats(-1e6, 1e6)


@given(
    st.dictionaries(
        st.sampled_from("abcd"), st.tuples(FINITE, st.lists(FINITE, min_size=3, max_size=3)), min_size=1
    )
)
def test_the_reward_is_the_weighted_sum(parts: dict[str, tuple[float, list[float]]]) -> None:
    rewards = combine(
        {name: scores for name, (_, scores) in parts.items()},
        {name: weight for name, (weight, _) in parts.items()},
    )
    for i, reward in enumerate(rewards):
        assert reward == pytest.approx(
            sum(weight * scores[i] for weight, scores in parts.values()), rel=1e-9, abs=1e-3
        )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_an_error_and_not_a_zero(bad: float) -> None:
    with pytest.raises(VerifierError, match="b: scored sample 1 as") as error:
        combine({"a": [1.0, 1.0], "b": [0.0, bad]}, {"a": 1.0, "b": 0.0})
    assert error.value.verifier == "b"


@pytest.mark.parametrize("weight", [0.0, 1.0, 1e6])
def test_scores_that_float32_or_their_sum_cannot_hold_name_their_verifier(weight: float) -> None:
    large = 1e308 if weight < 2 else 1e25
    scored = f"a: scored sample 0 as 1e.*, and its product with the weight {weight:g}, "
    limit = scored + r"must be between -1e\+30 and 1e\+30"
    with pytest.raises(VerifierError, match=limit.replace("1e+06", r"1e\+06")):
        combine({"a": [large], "b": [-large]}, {"a": weight, "b": weight})


def test_components_must_belong_together() -> None:
    with pytest.raises(VerifierError, match="b: 1 scores for 2 samples"):
        combine({"a": [1.0, 1.0], "b": [0.0]}, {"a": 1.0, "b": 1.0})
    with pytest.raises(VerifierError, match="b: has no weight"):
        combine({"b": [0.0]}, {"a": 1.0})
    with pytest.raises(VerifierError, match=r"set reward\.verifiers"):
        combine({}, {"a": 1.0})

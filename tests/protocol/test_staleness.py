"""Rule F and its parts, by hand-computed cases and against a direct reading of the rule."""

from hypothesis import given
from hypothesis import strategies as st

from protocol.staleness import (
    Bound,
    Policy,
    admits,
    deadline,
    effective_deadline,
    feasible,
    holds,
    is_published,
    lag,
    trainable_counts,
)


@given(st.lists(st.integers(0, 6), max_size=12), st.integers(0, 4), st.integers(1, 3))
def test_feasible_is_rule_f_as_written(deadlines: list[int], next_step: int, b: int) -> None:
    late = any(d < next_step for d in deadlines)
    as_written = all(sum(x <= d for x in deadlines) <= (d - next_step + 1) * b for d in range(next_step, 8))
    assert feasible(deadlines, next_step, b) == (as_written and not late)


@given(st.lists(st.integers(0, 6), max_size=12), st.integers(0, 4), st.integers(1, 3))
def test_feasible_means_earliest_deadline_first_is_never_late(
    deadlines: list[int], next_step: int, b: int
) -> None:
    on_time = all(next_step + place // b <= d for place, d in enumerate(sorted(deadlines)))
    assert feasible(deadlines, next_step, b) == on_time


def test_all_engines_current_admit_e_plus_one_batches() -> None:
    for e in range(4):
        for b in (1, 3):
            assert feasible([deadline(5, e)] * ((e + 1) * b), 5, b)
            assert not feasible([deadline(5, e)] * ((e + 1) * b + 1), 5, b)


def test_a_late_group_counts_with_the_newest_deadline_under_mask_only() -> None:
    for policy, expected in ((Policy.MASK, 9), (Policy.WAIT, 5), (Policy.DROP, 5)):
        assert effective_deadline(5, 7, Bound(2, 1, policy)) == expected
    assert effective_deadline(8, 7, Bound(2, 1, Policy.MASK)) == 8


def test_holds_counts_late_groups_as_the_policy_says() -> None:
    assert holds([4], 5, Bound(1, 1, Policy.MASK))
    assert not holds([4], 5, Bound(1, 1, Policy.WAIT))


def test_lag_of_tokens() -> None:
    assert lag(7, 5) == 2
    assert trainable_counts(7, {4: 2, 5: 3, 7: 1, 6: 0}, 2) == {5: 3, 7: 1}


def test_no_lease_is_granted_late_under_any_policy() -> None:
    for policy in Policy:
        assert not admits([], 4, 5, Bound(0, 1, policy))
        assert admits([], 5, 5, Bound(0, 1, policy))
        assert not admits([5], 5, 5, Bound(0, 1, policy))


@given(st.integers(0, 6), st.integers(0, 5), st.integers(0, 40))
def test_published_version_is_never_too_old_to_train_its_samples(every: int, e: int, steps: int) -> None:
    newest = 0
    for version in range(1, steps + 1):
        if is_published(version, newest, every, e):
            assert version - newest == min(every or e + 1, e + 1)
            newest = version
        assert deadline(newest, e) >= version

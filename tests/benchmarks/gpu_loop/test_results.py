"""Trained tokens a second, from numbers that were worked out by hand."""

import pytest

from tests.benchmarks.gpu_loop.results import (
    Step,
    means_of,
    printed_steps,
    ratios_of,
    speed,
    steps_of,
)


def test_speed_counts_the_steps_in_the_middle() -> None:
    steps = [Step(time, 100.0) for time in (50.0, 60.0, 61.0)] + [Step(66.0, 300.0), Step(67.0, 100.0)]
    found = speed(steps, first=2, last=1)
    assert found["trained_tokens_per_s"] == pytest.approx(400 / 6)
    assert (found["step_s"], found["trained_tokens_of_step"], found["counted_steps"]) == (3.0, 200.0, 2)
    assert found["seconds_of_steps"] == [10.0, 1.0, 5.0, 1.0]


@pytest.mark.parametrize(("first", "last"), [(0, 1), (2, 3), (6, 0)])
def test_speed_of_no_step_is_refused(first: int, last: int) -> None:
    with pytest.raises(ValueError, match="5 steps: none is left"):
        speed([Step(float(time), 1.0) for time in range(5)], first=first, last=last)


def test_reports_give_steps_and_means_of_what_was_measured() -> None:
    report = {name: None for name in ("engine_busy", "lag_mean", "wasted_tokens", "mfu", "memory_peak_gb")}
    report |= dict.fromkeys(("publish_s", "other_s", "response_length_mean"), 1.0)
    reports = [report | {"time": 2.0 * n, "trained_tokens": n, "train_s": n, "wait_s": 0.5} for n in range(8)]
    assert steps_of(reports)[3] == Step(6.0, 3)
    assert means_of(reports) == {
        "wait_s": 0.5, "train_s": 4.5, "publish_s": 1.0, "other_s": 1.0, "response_length_mean": 1.0,
    }  # fmt: skip


def test_ratios_are_of_ours_over_theirs() -> None:
    speeds = {"tether": 30.0, "tether-turns": 20.0, "trl": 10.0}
    ways = {name: {"trained_tokens_per_s": value} for name, value in speeds.items()}
    assert ratios_of(ways) == {
        "tether_over_trl": 3.0, "tether-turns_over_trl": 2.0, "tether-turns_over_tether": 20 / 30,
    }  # fmt: skip


def test_printed_steps_are_found_between_other_lines() -> None:
    steps = ('{"time": 1.5, "trained_tokens": 8.0}', '{"time": 2.5, "trained_tokens": 4}')
    output = "loading\n" + "".join(f'step {step}\n{{"loss": 0}}\n' for step in steps)
    assert steps_of(printed_steps(output, "step ")) == [Step(1.5, 8.0), Step(2.5, 4)]
    assert printed_steps("", "step ") == []

"""Tests what windows of a run under kills say together."""

import pytest

from tests.benchmarks.faults.windows import Kill, Window, curve, gaps_by_service, kill_times, measure, plan


def test_plan_has_every_rate_once_a_round_in_an_order_of_the_seed() -> None:
    planned = plan([60.0, 20.0], 3, seed=1)
    assert planned == plan([60.0, 20.0], 3, seed=1)
    for number in range(3):
        assert sorted(period for r, period in planned if r == number) == [0.0, 20.0, 60.0]


def test_kills_lie_in_the_middle_of_their_periods() -> None:
    assert kill_times(60, 120) == [30, 90]
    assert kill_times(0, 120) == []


def test_window_counts_its_own_steps_and_the_gap_after_each_kill() -> None:
    steps = [{"time": time, "trained_tokens": 10} for time in (99, 101, 102, 107, 109)]
    window = Window(0, 5.0, 100.0, 110.0, (Kill("trainer", 102.5), Kill("ingest", 107.5)))
    measured = measure(window, steps)
    assert (measured["commits"], measured["tokens_per_s"]) == (4, 4.0)
    assert [kill["gap_s"] for kill in measured["kills"]] == [5.0, 2.0]
    assert gaps_by_service([measured])["trainer"] == {"kills": 1, "median_s": 5.0, "longest_s": 5.0}


def test_window_without_kills_counts_all_the_same() -> None:
    measured = measure(Window(0, 0.0, 100.0, 110.0), [{"time": 105, "trained_tokens": 30}])
    assert (measured["tokens_per_s"], measured["kills"]) == (3.0, [])


def test_ratio_compares_windows_of_the_same_round() -> None:
    rows = [(0, 0.0, 100.0), (0, 20.0, 90.0), (1, 20.0, 50.0), (1, 0.0, 50.0)]
    windows = [
        {"round": r, "period_s": p, "tokens_per_s": rate, "kills": [], "seconds": 60.0, "commits": 60}
        for r, p, rate in rows
    ]
    windows[1]["kills"] = [{"name": "trainer", "gap_s": 7.0}]
    undisturbed, killed = curve(windows)
    assert (undisturbed["period_s"], undisturbed["ratio"]) == (0.0, 1.0)
    assert killed["ratio"] == pytest.approx(140 / 150, abs=1e-3)
    assert (killed["least"], killed["most"]) == (0.9, 1.0)
    assert (undisturbed["by_gaps"], killed["by_gaps"]) == (1.0, 0.95), "6 of 120 s were lost"

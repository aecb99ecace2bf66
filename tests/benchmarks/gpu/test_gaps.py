"""The arithmetic of the GPU benchmark, on times made by hand."""

import math

import pytest

from tests.benchmarks.gpu.gaps import UNDISTURBED, Phase, Step, gaps_by_phase, rate, spread
from tests.benchmarks.gpu.measure import Update, summary
from tests.benchmarks.gpu.shapes import SIZES, shapes_of
from tests.benchmarks.gpu.table import render

QUIET = Phase(UNDISTURBED, 0.0, 1.0)
PHASES = [Phase("publish", 1.0, 2.0), Phase("stage", 2.0, 3.0), Phase("commit", 3.0, 3.5)]


def steps() -> list[Step]:
    """One each 0.1 s, but for a stall of 0.5 s at the commit."""
    times = [i / 10 for i in range(31)] + [3.5 + i / 10 for i in range(10)]
    return [Step(at, 4, prefill=False) for at in times]


def test_a_gap_belongs_to_the_last_phase_that_it_touches() -> None:
    gaps = gaps_by_phase([0.5, 1.5, 2.9, 3.1, 9.0], [QUIET, *PHASES])
    assert gaps == [
        [],
        [pytest.approx(1000)],
        [pytest.approx(1400)],
        [pytest.approx(200), pytest.approx(5900)],
    ]


def test_a_gap_with_a_prefill_is_left_out_and_so_is_one_outside_all_phases() -> None:
    assert gaps_by_phase([0.2, 0.3, 0.4, 0.6], [QUIET], prefills=[0.3]) == [[pytest.approx(200)]]
    assert gaps_by_phase([7.0, 8.0], [QUIET, *PHASES]) == [[], [], [], []]


def test_rate_counts_whole_steps() -> None:
    tokens, seconds = rate(steps(), 0.15, 0.31)
    assert (tokens, seconds) == (12, pytest.approx(0.3))
    assert rate([], 0.0, 1.0) == (0, 0.0)


def test_spread_of_nothing_has_no_figures() -> None:
    assert spread([]) == {"n": 0}
    assert spread([3.0, 1.0, 2.0]) == {"n": 3, "p50": 2.0, "p99": 3.0, "max": 3.0}


def test_summary_finds_the_stall_and_the_table_says_whether_the_aims_are_reached() -> None:
    found = summary([Update(QUIET, PHASES, {"pause_ms": 7.0})], steps(), [[]], prefills=[])
    expected = {"publish": 1000, "stage": 1000, "commit": 500, "pause_ms": 7, "total": 2500}
    assert found["ms"] == {name: pytest.approx(ms) for name, ms in expected.items()}
    assert found["stall_ms"]["max"] == pytest.approx(400)
    assert found["gaps"]["commit"]["max"] == pytest.approx(500)
    assert found["decode"]["share"] == pytest.approx((21 / 2.5) / 10)
    facts = {
        "model": "tiny", "versions": {}, "engine": {}, "failed": {"shm": "gone"},
        "limits": {"ms": {"broadcast, 64 MiB buckets": 1600.0}},
        "parts": {"nccl": found | {"verified": True}, "per-tensor": found},
    }  # fmt: skip
    text = render(facts)
    assert "1.25 reached" in text
    assert "400 MISSED" in text
    assert text.count("MISSED") == 2  # the stall and the decoding, of the project's own way alone
    assert "failed: shm: gone" in text


def test_shapes_are_those_of_the_model() -> None:
    assert sum(math.prod(shape) for shape in shapes_of("7b")) * 2 == 15_231_233_024
    assert len(shapes_of("7b")) == 339
    assert SIZES["7b"].hidden // SIZES["7b"].heads == 128

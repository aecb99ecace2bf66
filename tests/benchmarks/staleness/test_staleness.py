"""The staleness benchmark aggregates what hand-made runs say."""

import json
import math
from pathlib import Path

import pytest

from deploy.examples.async_vs_sync.bands import band, crossing, final, mean_of, shares, smooth
from services.settings.load import load_settings
from tests.benchmarks.staleness.curve import Curve, curve_of, load_curve
from tests.benchmarks.staleness.execute import core_sets
from tests.benchmarks.staleness.figure import draw_curves, draw_summary
from tests.benchmarks.staleness.grid import BOUNDS, CORRECTIONS, TASKS, Cell, cells
from tests.benchmarks.staleness.summary import area, as_json, overview, summarise, table
from tests.benchmarks.versions import ROOT

LINE = [(0.0, 0.0, 0.0), (100.0, 1.0, 0.2), (200.0, 4.0, 0.6)]


def test_a_band_is_students() -> None:
    found = mean_of([1.0, 2.0, 3.0])
    assert found.value == 2.0
    assert found.half == pytest.approx(4.303 / math.sqrt(3))  # two degrees of freedom, deviation 1
    assert mean_of([0.5]).half is None
    many = mean_of([0.0, 1.0] * 50)
    assert many.half == pytest.approx(1.96 * math.sqrt(100 / 99) / 2 / 10)


def test_a_band_covers_what_all_curves_have() -> None:
    other = [(50.0, 1.0, 0.3), (150.0, 2.0, 0.5), (300.0, 3.0, 0.5)]
    grid, means = band([LINE, other], 0, points=4)
    assert grid.tolist() == [50, 100, 150, 200]
    assert [mean.value for mean in means] == pytest.approx([0.2, 0.3, 0.45, 0.55])
    grid, _ = band([LINE, other], 1, points=3)
    assert grid.tolist() == [1, 2, 3]


def test_a_threshold_is_crossed_between_two_points() -> None:
    assert crossing(LINE, 0, 0.3) == pytest.approx(125)
    assert crossing(LINE, 1, 0.3) == pytest.approx(1.75)
    assert crossing(LINE, 0, 0.0) == 0
    assert crossing(LINE, 0, 0.7) is None


def test_a_mean_score_is_the_area_up_to_a_place() -> None:
    assert area(LINE, 200.0) == pytest.approx((0.1 * 100 + 0.4 * 100) / 200)
    assert area(LINE, 150.0) == pytest.approx((0.1 * 100 + 0.3 * 50) / 150)
    assert final(LINE) == 0.6
    assert final([(float(i), 0.0, float(i)) for i in range(16)]) == 14.5
    assert smooth([1.0, 2.0, 6.0], 2) == [1.0, 1.5, 4.0]
    assert shares([{0: 3}, {0: 1, 2: 4}]) == {0: 0.5, 2: 0.5}


def report(step: int, **fields: object) -> dict[str, object]:
    """A step that trained two groups and took a second."""
    return {
        "time": 10.0 + step, "train_s": 0.5, "publish_s": 0.25, "groups": 2, "reward_mean": step / 4,
        "lag_histogram": {"0": 1, str(step): 2}, "masked_tokens": 1, "dropped_groups": 0, "skipped": "",
        "clip_fraction": 0.1 * step, "importance_ess": None, **fields,
    }  # fmt: skip


def curve(scores: dict[int, float] | None = None) -> Curve:
    return curve_of([report(step) for step in range(4)], 8, {} if scores is None else scores)


def test_a_curve_is_what_the_step_reports_say(tmp_path: Path) -> None:
    found = curve({0: 0.1, 2: 0.4})
    assert found.samples == [16, 32, 48, 64]
    assert found.seconds == [0.75, 1.75, 2.75, 3.75]
    assert found.points == [(0, 0.0, 0.1), (32, 1.75, 0.4)]
    assert curve().points[1] == (32, 1.75, 0.25)
    assert found.lags == {0: 5, 1: 2, 2: 2, 3: 2}
    assert found.late_lags == {0: 2, 2: 2, 3: 2}
    assert (found.masked_tokens, found.skipped_steps) == (4, 0)
    assert found.measures == pytest.approx({"clip_fraction": 0.15})
    found.write(tmp_path / "curve.json")
    assert load_curve(tmp_path / "curve.json") == found


def test_a_report_has_a_row_for_each_bound_and_a_figure_for_each_task(tmp_path: Path) -> None:
    curves = {
        Cell("max3", correction, bound, seed): curve({0: 0.0, 4: 0.9 - 0.1 * bound - 0.02 * seed})
        for correction in ("clip", "truncated")
        for bound in (0, 4)
        for seed in (0, 1)
    }
    summaries = summarise(curves)
    assert summaries["max3", "clip", 0].samples_to == pytest.approx([64 * 0.8 / 0.9, 64 * 0.8 / 0.88])
    assert summaries["max3", "clip", 4].samples_to == [None, None]
    text = table("max3", summaries)
    assert text.count("\n| 0 |") == text.count("\n| 4 |") == text.count("**") // 2 == 2
    assert "| 0 of 2 |" in text
    part = {key: row for key, row in summaries.items() if key != ("max3", "truncated", 4)}
    assert "\n| truncated | 0.89 ± 0.13 |  |" in overview("max3", part)
    assert "0.89 ± 0.13" in text  # 12.706 * 0.02 / sqrt(2) / sqrt(2)
    assert json.loads(json.dumps(as_json(summaries)))[0]["final"]["mean"] == pytest.approx(0.89)
    draw_curves("max3", curves, summaries, tmp_path / "curves.png")
    draw_summary(summaries, tmp_path / "summary.png")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_a_part_of_the_runs_compares_everything() -> None:
    found = cells(["max3", "sort3"], list(CORRECTIONS), BOUNDS, range(3))
    assert len(set(found)) == len(found) == 3 * 5 * (5 + len(CORRECTIONS))
    assert {cell.seed for cell in found[: len(found) // 3]} == {0}


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_correction_is_a_configuration(correction: str, tmp_path: Path) -> None:
    cell = Cell("sort3", correction, 4, 1)
    overrides = [*cell.overrides(8), f"run.dir={tmp_path}"]
    settings = load_settings(str(ROOT / TASKS["sort3"].config), overrides, environ={})
    assert settings.bound.max_staleness == 4
    assert settings.trainer.seed == settings.prompts.seed == 1


def test_runs_at_the_same_time_have_equally_many_cores() -> None:
    for jobs in (1, 2, 64):
        found = core_sets(jobs)
        assert len(found) == jobs
        assert len({len(cores) for cores in found}) == 1
        assert all(len(set(cores)) == len(cores) for cores in found)

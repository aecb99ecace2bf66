"""Tests which numbers of a line are tracked, and under which names."""

import json
from typing import Any

import pytest

from protocol.messages import StepReport
from services.run_record.steps import StepLog
from services.tracking.points import MAX_NUMBERS, flat_settings, point_of


def numbers(file: str, line: Any) -> dict[str, float]:
    point = point_of(file, json.dumps(line).encode(), 7)
    assert point is not None
    assert (point.ordinal, point.version, point.time) == (7, 3, 5.0)
    return dict(point.numbers)


def test_numbers_of_a_step_are_named_by_their_fields() -> None:
    line = {
        "step": 2, "version": 3, "time": 5.0, "epoch": "e", "reward_mean": 0.5, "lag_max": 1, "kl": None,
        "on": True, "lag_histogram": {"0": 7, "2": 1}, "skipped": "", "ok name!": 1,
    }  # fmt: skip
    assert numbers("metrics.jsonl", line) == {
        "train/reward_mean": 0.5,
        "train/lag_max": 1.0,
        "train/lag_histogram/0": 7.0,
        "train/lag_histogram/2": 1.0,
        "train/ok name_": 1.0,
    }


def test_numbers_of_an_evaluation_have_the_name_of_their_set() -> None:
    line = {"version": 3, "step": 2, "set": "math", "time": 5.0, "greedy": 0.25, "pass_at_k": {"4": 0.5}}
    assert numbers("eval.jsonl", line) == {"eval/math/greedy": 0.25, "eval/math/pass_at_k/4": 0.5}


def test_numbers_of_a_foreign_line_are_bounded() -> None:
    line = {"version": 3, "time": 5.0, **{f"x{i}": i for i in range(5000)}}
    assert len(numbers("metrics.jsonl", line)) == MAX_NUMBERS


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b'{"version": "3"}', b'{"version": -1}', b"[" * 100_000]
)
def test_lines_of_no_step_are_left_out(data: bytes) -> None:
    assert point_of("metrics.jsonl", data, 0) is None


def test_numbers_that_are_not_finite_are_left_out() -> None:
    point = point_of("metrics.jsonl", b'{"version": 1, "loss": NaN, "kl": Infinity, "x": 1}', 0)
    assert point is not None
    assert point.numbers == {"train/x": 1.0}


def test_settings_are_flat_and_plain() -> None:
    values = {
        "run": {"steps": 3, "name": "r"},
        "model": {"scratch": None, "path": "m"},
        "a": {"b": [1, {"c": 2}]},
    }
    assert flat_settings(values) == {
        "run.steps": 3,
        "run.name": "r",
        "model.path": "m",
        "a.b": '[1, {"c": 2}]',
    }


def test_reports_of_a_run_have_points(tmp_path: Any) -> None:
    path = tmp_path / "metrics.jsonl"
    StepLog(path).append(StepReport(step=0, version=1, epoch="e", reward_mean=0.5))
    point = point_of("metrics.jsonl", path.read_bytes(), 0)
    assert point is not None
    assert point.numbers["train/reward_mean"] == 0.5

"""The history of a run: exact while it is short, bounded when it is long, and sent in increments."""

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.monitor.history import MAX_WARNINGS, History
from services.run_record.steps import read_steps
from tests.services.monitor.runs import step_line, write_lines


def read(history: History) -> None:
    while history.read_more():
        pass


def merged(known: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """What the page has after an answer: points by their start."""
    points = {} if answer["reset"] else dict(known["points"])
    columns = answer["columns"]
    for row, start in enumerate(columns["start"]):
        points[start] = {name: values[row] for name, values in columns.items()} | {
            "lags": answer["lags"][row]
        }
    return {"points": dict(sorted(points.items())), "revision": answer["revision"]}


def test_short_run_is_shown_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, (step_line(step) for step in range(50)))
    history = History(path)
    read(history)
    answer = history.since(0)
    steps = read_steps(path)
    assert answer["width"] == 1
    assert answer["last"] == steps[-1]
    for name in ("reward_mean", "loss", "trained_tokens", "lag_max"):
        assert answer["columns"][name] == pytest.approx([line[name] for line in steps], rel=1e-6)
    assert [dict(rows) for rows in answer["lags"]] == [
        {int(lag): tokens for lag, tokens in line["lag_histogram"].items()} for line in steps
    ]


def test_long_run_keeps_means_and_largest(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, (step_line(step) for step in range(1000)))
    history = History(path, max_points=100)
    read(history)
    answer, steps = history.since(0), read_steps(path)
    width = answer["width"]
    assert width == 16
    assert len(answer["columns"]["start"]) == 63 <= 100
    for row, start in enumerate(answer["columns"]["start"]):
        part = steps[start : start + width]
        mean = sum(line["reward_mean"] for line in part) / len(part)
        assert answer["columns"]["reward_mean"][row] == pytest.approx(mean, rel=1e-6)
        assert answer["columns"]["lag_max"][row] == max(line["lag_max"] for line in part)
        assert answer["columns"]["time"][row] == pytest.approx(part[-1]["time"], rel=1e-6)


@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.integers(0, 9), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.integers(3, 20),
)
def test_increments_add_up_to_the_whole(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[int, int, bool]], max_points: int
) -> None:
    """Whatever a run does (steps, rewinds), a page that asked each time has what one that asks at the end
    gets, and that is what the file says."""
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    history = History(path, max_points)
    known: dict[str, Any] = {"points": {}, "revision": 0}
    step, epoch = 0, 0
    truth: dict[int, dict[str, Any]] = {}
    for made, back, asks in parts:
        if back and step:
            step, epoch = max(0, step - back), epoch + 1
        lines = [step_line(step + i, f"e{epoch}") for i in range(made)]
        truth = {s: line for s, line in truth.items() if s < step} | {line["step"]: line for line in lines}
        step += made
        write_lines(path, lines)
        read(history)
        if asks:
            known = merged(known, history.since(known["revision"]))
    known = merged(known, history.since(known["revision"]))
    whole = merged({"points": {}, "revision": 0}, history.since(0))
    assert known == whole
    width = history.since(0)["width"]
    for start, point in whole["points"].items():
        part = [line for s, line in truth.items() if start <= s < start + width]
        assert point["reward_mean"] == pytest.approx(
            sum(line["reward_mean"] for line in part) / len(part), rel=1e-5
        )
        assert sum(tokens for _, tokens in point["lags"]) == sum(
            sum(line["lag_histogram"].values()) for line in part
        )
    assert len(whole["points"]) == len({s // width for s in truth}) <= max_points


def test_reader_that_knows_everything_gets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, (step_line(step) for step in range(5)))
    history = History(path)
    read(history)
    answer = history.since(history.since(0)["revision"])
    assert (answer["reset"], answer["columns"]["start"]) == (False, [])


def test_values_that_were_not_measured_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [step_line(0, entropy=None, eval_reward=0.5), step_line(1, kl_mean=1.0)])
    history = History(path)
    read(history)
    columns = history.since(0)["columns"]
    assert columns["entropy"][0] is None
    assert columns["eval_reward"] == [0.5, None]
    assert columns["kl_mean"][0] is None


def test_lines_that_are_no_steps_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'[]\n{"step":-1,"epoch":"e"}\n{"step":1e9,"epoch":"e"}\n{"step":true,"epoch":"e"}\n\xff\n{"st'
    )
    history = History(path)
    read(history)
    assert history.since(0)["columns"]["start"] == []


def test_replaced_file_is_another_history(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, (step_line(step) for step in range(5)))
    history = History(path)
    read(history)
    before = history.since(0)
    path.unlink()
    write_lines(path, (step_line(step) for step in range(2)))
    read(history)
    after = history.since(before["revision"])
    assert after["reset"]
    assert after["id"] != before["id"]
    assert after["columns"]["step"] == [0, 1]


def test_newest_warnings_of_steps_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, (step_line(step, warnings=[f"step {step}: a", "b"]) for step in range(40)))
    write_lines(path, [step_line(40, warnings="none"), step_line(41, time=None, warnings=["c"])])
    history = History(path)
    read(history)
    found = history.warnings()
    assert len(found) == MAX_WARNINGS
    assert [event["text"] for event in found[-2:]] == ["step 39: a", "b"]
    assert found[-1] == {
        "seq": 0, "time_ms": 1_800_000_039_000, "kind": "warning",
        "topic": "run", "level": "warn", "text": "b",
    }  # fmt: skip


def test_drops_are_drawn_by_reason(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [step_line(0), step_line(1, dropped_by_reason={"stale": 2, "attempts": 0})])
    history = History(path)
    read(history)
    columns = history.since(0)["columns"]
    assert (columns["dropped_for_stale"], columns["dropped_for_attempts"]) == ([None, 2], [None, 0])


def test_pace_is_of_the_last_steps_while_the_run_is_on_and_of_all_once_it_is_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(
        path,
        (
            step_line(
                step, engine_busy=0.99, reward_busy=0.0, time=4.0 * step, step_s=4.0, other_s=0.0, train_s=0.1
            )
            for step in range(30)
        ),
    )
    history = History(path)
    history.read_more()
    write_lines(
        path,
        (
            step_line(
                step, engine_busy=0.0, reward_busy=1.0, time=time.time(), step_s=4.0, other_s=0.0, train_s=0.1
            )
            for step in range(30, 55)
        ),
    )
    history.read_more()
    on, over = history.pace("running", 10), history.pace("done", 0)
    assert on["bottleneck"].startswith("bottleneck: rewards")
    assert over["bottleneck"].startswith("bottleneck: none")
    assert "ETA" in on["rate"]
    assert over["rate"] == ""

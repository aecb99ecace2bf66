"""Tests the trace of a run: the recorded one's, and a log with each way that a group can end."""

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from protocol.errors import SettingsError
from protocol.lifecycle import GroupState
from protocol.staleness import Policy
from services.cli import app
from services.ledger.event_log.events import (
    AcceptEvent,
    AppliedEvent,
    ClaimEvent,
    CommitEvent,
    DropEvent,
    LeaseEvent,
    LedgerEvent,
    RebuildEvent,
    ReleaseEvent,
    TakeEvent,
)
from services.run_record.evaluations import Evaluation, append_evaluation
from services.run_record.steps import read_steps
from services.tracking.trace_records import TraceRecords, trace_records, without_overlaps, write_perfetto
from tests.services.monitor.runs import recorded_run


def lease(group: int, at_ms: int, holder: str = "rollout.0.ab") -> LeaseEvent:
    return LeaseEvent(
        time_ms=at_ms, group=group, token="t", holder=holder, engine=holder, epoch="e", version=0, deadline=1,
        bound=1, groups_per_step=2, policy=Policy.WAIT, attempt=1,
    )  # fmt: skip


def accept(group: int, at_ms: int) -> AcceptEvent:
    return AcceptEvent(time_ms=at_ms, group=group, token="t", counts={0: 7}, reward=0.5)


def slices(*events: LedgerEvent) -> list[tuple[str, int, str, int, int, str]]:
    """Process, lane, name, begin and length in ms, outcome of each slice."""
    records = list(trace_records(events, []))
    names = {record["pid"]: record["args"]["name"] for record in records if record["ph"] == "M"}
    return [
        (names[r["pid"]], r["tid"], r["name"], r["ts"] // 1000, r["dur"] // 1000, r["args"]["outcome"])
        for r in records
        if r["ph"] == "X"
    ]


def test_a_group_is_on_its_workers_lane_then_in_the_queue_then_in_its_step() -> None:
    commit = CommitEvent(
        time_ms=60, epoch="e", step=0, version=1, digest="1", groups={0: {0: 7}},
        issued=2, trained=1, dropped=0, active=1,
    )  # fmt: skip
    taken = TakeEvent(time_ms=50, epoch="e", step=0, groups=[0])
    assert slices(lease(0, 10), lease(1, 20), accept(0, 30), taken, commit) == [
        ("rollout.0", 1, "group 0", 10, 20, "accepted"),
        ("scored, in the queue", 1, "group 0", 30, 20, "taken"),
        ("groups of the step", 1, "group 0", 50, 10, "trained"),
        ("rollout.0", 2, "group 1", 20, 40, "not ended"),
    ]


def test_a_lane_is_used_again_and_no_slices_overlap_on_it() -> None:
    released = ReleaseEvent(time_ms=20, group=0, token="t", reason="drained")
    found = slices(lease(0, 10), lease(1, 10), released, lease(2, 30))
    assert sorted((name, lane) for _, lane, name, *_ in found) == [
        ("group 0", 1),
        ("group 1", 2),
        ("group 2", 1),
    ]


def test_slices_end_where_a_claim_or_a_rebuild_takes_a_group_back() -> None:
    taken = TakeEvent(time_ms=40, epoch="e", step=0, groups=[0])
    claim = ClaimEvent(time_ms=50, epoch="f", untaken=[0])
    rebuild = RebuildEvent(time_ms=60, epoch="g", after=1, version=0, issued=1, trained=0, dropped=0)
    dropped = DropEvent(
        time_ms=80,
        group=0,
        token="t",
        reason="stale",
        detail="",
        wasted_tokens=0,
        from_state=GroupState.LEASED,
    )
    outcomes = [
        (process, outcome)
        for process, *_, outcome in slices(
            lease(0, 10), accept(0, 30), taken, claim, rebuild, lease(0, 70, "rollout.1.cd"), dropped
        )
    ]
    assert outcomes == [
        ("rollout.0", "accepted"),
        ("scored, in the queue", "taken"),
        ("groups of the step", "claim"),
        ("scored, in the queue", "rebuild"),
        ("rollout.1", "dropped: stale"),
    ]


def test_slices_of_steps_are_cut_and_those_of_evaluations_get_lanes() -> None:
    steps = [
        {"step": 0, "time": 10.0, "wait_s": 1.0, "train_s": 2.0},
        {"step": 1, "time": 12.0, "wait_s": 1.0, "train_s": 1.0000074},
    ]
    scored = [Evaluation(version=1, set=name, greedy=1.0, seconds=3.0, time=12.0) for name in ("a", "b")]
    drawn = [r for r in without_overlaps(trace_records([], steps, scored)) if r["ph"] == "X"]
    assert [(r["name"], r["tid"], r["ts"], r["dur"]) for r in drawn] == [
        ("version 1 on a", 0, 9_000_000, 3_000_000),
        ("version 1 on b", 1, 9_000_000, 3_000_000),
        ("wait 0", 0, 7_000_000, 1_000_000),
        ("train 0", 0, 8_000_000, 2_000_000),
        ("wait 1", 0, 10_000_000, 999_993),
        ("train 1", 0, 10_999_993, 1_000_007),
    ]


def test_an_engines_version_is_an_instant_on_its_worker() -> None:
    applied = AppliedEvent(time_ms=5, engine="rollout.1.cd", epoch="e", version=3)
    (instant,) = [record for record in trace_records([applied], []) if record["ph"] == "i"]
    assert (instant["name"], instant["ts"]) == ("serves version 3", 5000)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return recorded_run(tmp_path / "run")


def test_the_command_writes_a_file_with_every_step_and_group(run_dir: Path, tmp_path: Path) -> None:
    out, lines = tmp_path / "run.json", read_steps(run_dir / "metrics.jsonl")
    end = lines[-1]["time"]
    append_evaluation(run_dir, Evaluation(version=6, set="held", greedy=0.75, seconds=1.5, time=end))
    answer = CliRunner().invoke(app, ["trace", str(run_dir), "--perfetto", str(out)])
    assert answer.exit_code == 0, answer.output
    records: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    trained = [record for record in records if record["name"].startswith("train ")]
    assert [record["name"] for record in trained] == [f"train {line['step']}" for line in lines]
    assert [record["dur"] / 1e6 for record in trained] == pytest.approx(
        [line["train_s"] for line in lines], abs=1e-5
    )
    drawn = [r["args"] for r in records if r["name"] in ("longest pause, ms", "busy share")]
    assert drawn == [
        {name: line.get(name) or 0 for name in names}
        for line in lines
        for names in (("pause_ms",), ("engine_busy", "reward_busy"))
    ]
    (scored,) = [record for record in records if record["name"] == "version 6 on held"]
    assert (scored["dur"], scored["args"]["scores"]) == (1_500_000, "greedy 0.750")
    assert scored["ts"] + scored["dur"] == pytest.approx(end * 1e6, abs=1)
    ends = [r for r in records if r["ph"] == "X" and r["args"].get("outcome") == "trained"]
    assert len(ends) == sum(line["groups"] for line in lines)
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for record in records:
        if record["ph"] == "X":
            lanes.setdefault((record["pid"], record["tid"]), []).append((record["ts"], record["dur"]))
    for spans in lanes.values():
        spans.sort()
        assert all(a + length <= b for (a, length), (b, _) in pairwise(spans))


def test_the_command_needs_a_group_or_a_file(run_dir: Path) -> None:
    answer = CliRunner().invoke(app, ["trace", str(run_dir)])
    assert "GROUP, or --perfetto FILE" in str(answer.exception)


def test_a_group_and_a_file_exclude_each_other(run_dir: Path, tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["trace", str(run_dir), "1", "--perfetto", str(tmp_path / "trace.json")])
    assert "--perfetto writes the whole run: give it without the group 1" in str(answer.exception)
    assert not (tmp_path / "trace.json").exists()


def test_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run_dir, out = recorded_run(tmp_path), tmp_path / "absent/trace.json"
    with pytest.raises(SettingsError, match=rf"^{out} cannot be written: "):
        write_perfetto(run_dir, out)


def test_an_existing_file_or_directory_is_kept(tmp_path: Path) -> None:
    run_dir, out = recorded_run(tmp_path / "run"), tmp_path / "my_reward.py"
    out.write_text("mine")
    for path in (out, run_dir):
        with pytest.raises(SettingsError, match=rf"^{path} exists; give another file, or delete it"):
            write_perfetto(run_dir, path)
    assert out.read_text() == "mine"


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    run_dir, out = recorded_run(tmp_path), tmp_path / "pipe"
    os.mkfifo(out)
    with pytest.raises(SettingsError, match=rf"^{out} exists; "):
        write_perfetto(run_dir, out)
    assert out.is_fifo()


def test_file_of_the_run_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    (run_dir / "metrics.jsonl").unlink(missing_ok=True)
    (run_dir / "metrics.jsonl").mkdir()
    with pytest.raises(IsADirectoryError, match=r"metrics\.jsonl"):
        write_perfetto(run_dir, tmp_path / "trace.json")


def test_numbers_of_wrong_types_are_left_out() -> None:
    line = {"step": 1, "time": 2.0, "train_s": "long", "publish_s": 0.5, "lag_max": [1]}
    records = list(TraceRecords().step_records(line))
    assert [record["name"] for record in records if record["ph"] == "X"] == ["publish 1"]

"""Tests what is said of a run that is over: how it ended, its last step, where its results are."""

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SettingsError, TetherError
from protocol.host import full_disk
from services.launcher.scaling import run_lock
from services.ledger.event_log.archiver import FILE
from services.run_record.end import describe_ended_run, read_end, recording_end
from services.run_record.steps import read_last
from services.settings.load import run_settings
from services.tools.run_commands import (
    change_bound,
    drain_run,
    read_status,
    render_ended_run,
    render_run_status,
)
from tests.services.monitor.runs import recorded_run, step_line, write_lines


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return recorded_run(tmp_path)


def note(run_dir: Path, **event: Any) -> None:
    """Append an event to the log."""
    lines = (run_dir / FILE).read_text().splitlines()
    seq = json.loads(lines[-1])["seq"] + 1
    with (run_dir / FILE).open("a") as file:
        file.write(json.dumps({"seq": seq, "time_ms": 1_800_000_000_000 + seq, **event}) + "\n")


def ended(run_dir: Path) -> dict[str, Any]:
    facts = describe_ended_run(run_settings(run_dir))
    assert json.loads(json.dumps(facts)) == facts
    return facts


def test_status_of_an_interrupted_run_has_its_last_step_and_results(run_dir: Path) -> None:
    facts = read_status(run_dir)
    assert (facts["run_state"], facts["version"], facts["steps"]) == ("stopped", 7, 1000)
    assert facts["last_step"] == read_last(run_dir / "metrics.jsonl")
    assert {"metrics.jsonl", "audit.jsonl"} <= set(facts["results"])
    text = render_run_status(facts).splitlines()
    assert text[0].startswith("run recorded was stopped at version 7 of 1000, 2026-")
    assert text[2].startswith("last step 6: reward 0, ")
    assert text[-1].startswith(f"results in {run_dir}: audit.jsonl, metrics.jsonl")


def test_status_of_a_halted_run_names_cause_and_remedy(run_dir: Path) -> None:
    for group in range(3):
        note(run_dir, event="drop", group=group, token="", reason="attempts", detail="reward:math",
             wasted_tokens=0, **{"from": "waiting"})  # fmt: skip
    note(run_dir, event="halt", reason="attempts")
    facts = ended(run_dir)
    assert facts["run_state"] == "halted: attempts"
    assert "rewards of groups could not be computed (verifier math)" in facts["why"]
    assert "logs/reward.*.log; fix the verifier" in facts["why"]
    assert facts["ended"] == pytest.approx(1.8e9, rel=1e-3)
    note(run_dir, event="unhalt", reason="attempts")
    assert ended(run_dir)["run_state"] == "stopped"


def test_status_of_a_done_and_of_a_drained_run_differ(run_dir: Path) -> None:
    note(run_dir, event="drain", on=True)
    assert (ended(run_dir)["run_state"], ended(run_dir)["why"]) == ("drained", "it was drained")
    note(run_dir, event="drain", on=False)
    note(run_dir, event="steps", steps=7)
    assert (ended(run_dir)["run_state"], ended(run_dir)["why"]) == ("done", "all 7 steps were made")
    assert render_ended_run(ended(run_dir)).startswith("run recorded is done at version 7 of 7, ")


def test_status_of_a_failed_run_says_what_failed(run_dir: Path) -> None:
    with pytest.raises(SettingsError), recording_end(run_dir):
        raise SettingsError("reward.0 died 6 times in a minute")
    assert (ended(run_dir)["run_state"], ended(run_dir)["why"]) == (
        "failed",
        "reward.0 died 6 times in a minute",
    )
    assert render_ended_run(ended(run_dir)).startswith("run recorded failed at version 7 of 1000, ")
    with recording_end(run_dir):
        pass
    assert ended(run_dir)["run_state"] == "stopped"


def test_a_refused_start_leaves_the_end_before_it(run_dir: Path) -> None:
    with recording_end(run_dir):
        pass
    before = (run_dir / "ended.json").read_bytes()
    with pytest.raises(SettingsError), recording_end(run_dir, is_on=lambda: False):
        raise SettingsError("setting run.name cannot change")
    assert (run_dir / "ended.json").read_bytes() == before


@pytest.mark.parametrize("time", ["1e300", "-1e18"])
def test_an_end_at_no_time_is_none(run_dir: Path, time: str) -> None:
    (run_dir / "ended.json").write_text(f'{{"time": {time}}}')
    assert read_end(run_dir) is None


def test_status_of_a_run_that_failed_unexpectedly_says_how(run_dir: Path) -> None:
    failures = ExceptionGroup("tasks", [OSError(28, "No space left on device")])
    with pytest.raises(ExceptionGroup), recording_end(run_dir):
        raise failures
    assert (ended(run_dir)["run_state"], ended(run_dir)["why"]) == (
        "failed",
        "OSError: [Errno 28] No space left on device",
    )
    with pytest.raises(KeyboardInterrupt), recording_end(run_dir):
        raise KeyboardInterrupt
    assert ended(run_dir)["run_state"] == "stopped"


def test_a_run_without_a_ledger_of_its_own_may_be_on(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TETHER_REDIS_URL", raising=False)
    endpoint = run_dir / "ledger/endpoint.json"
    endpoint.parent.mkdir()
    endpoint.write_text('{"url": "redis://127.0.0.1:1/0"}')
    assert "TETHER_REDIS_URL" not in read_status(run_dir)["why"]
    endpoint.unlink()
    assert read_status(run_dir)["why"].endswith("set TETHER_REDIS_URL")
    with pytest.raises(SettingsError, match="set TETHER_REDIS_URL"):
        drain_run(run_dir, False)
    with run_lock(run_dir), pytest.raises(SettingsError, match="set TETHER_REDIS_URL"):
        read_status(run_dir)


def test_changes_of_a_run_that_is_over_are_refused(run_dir: Path) -> None:
    before = sorted(path.name for path in run_dir.iterdir())
    for name, change in (
        ("set", lambda: change_bound(run_dir, "max-staleness", "2")),
        ("drain", lambda: drain_run(run_dir, False)),
    ):
        with pytest.raises(
            SettingsError, match="recorded is not running; it was stopped at version 7"
        ) as refused:
            change()
        assert f"`tether {name}` changes a running run" in str(refused.value)
        assert "\n" not in str(refused.value)
    assert sorted(path.name for path in run_dir.iterdir()) == before


def test_a_run_that_a_full_disk_ended_says_so(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_disk, "MIN_FREE_BYTES", 1 << 70)
    with (
        pytest.raises(SettingsError, match=r"is full: make room.*the ledger does not answer"),
        recording_end(run_dir),
    ):
        raise TetherError("the ledger does not answer")
    (run_dir / "ended.json").unlink()  # there was no room for it
    facts = ended(run_dir)
    assert (facts["run_state"], facts["why"][:21]) == ("failed", f"the disk of {run_dir}"[:21])


def test_the_bottleneck_of_an_ended_run_is_of_all_its_steps(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").unlink()
    busy = {"engine_busy": 0.95, "step_s": 10.0, "train_s": 1.0, "publish_s": 0.0}
    idle = {**busy, "engine_busy": 0.1, "reward_busy": 1.0}
    write_lines(
        run_dir / "metrics.jsonl", (step_line(step, **(busy if step < 300 else idle)) for step in range(320))
    )
    assert "bottleneck: engines (busy 90%" in render_run_status(read_status(run_dir))


def test_a_disk_that_was_full_is_named_though_it_has_room_again(run_dir: Path) -> None:
    with pytest.raises(SettingsError, match="is full: make room"), recording_end(run_dir, lambda: True):
        raise TetherError("the ledger does not answer")
    assert ended(run_dir)["why"].startswith(f"the disk of {run_dir} is full: make room, then start")

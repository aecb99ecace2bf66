"""The browser of samples, on a recorded run: steps in the archive, and steps in the spool."""

import shutil
from pathlib import Path

import pytest

from protocol.codec import decode_payload
from protocol.messages import ScoredRollout
from services.run_record.samples import SampleBrowser
from services.run_record.tail import EventTail
from services.settings.load import run_settings
from services.tools.recorded.run import RecordedRun
from tests.services.monitor.runs import recorded_run


def browser(run_dir: Path) -> SampleBrowser:
    return SampleBrowser(run_dir, EventTail(run_dir).read_all())


@pytest.mark.parametrize("step", range(7))
def test_samples_are_those_that_the_step_trained(tmp_path: Path, step: int) -> None:
    run_dir = recorded_run(tmp_path)
    shown = browser(run_dir).open(step, None)
    records = RecordedRun(run_settings(run_dir), range(step, step + 1)).command(step).records
    messages = [decode_payload(record) for record in records]
    assert [item["group"] for item in shown["groups"]] == sorted(
        message.rollout.group for message in messages if isinstance(message, ScoredRollout)
    )
    first = next(
        message
        for message in messages
        if isinstance(message, ScoredRollout) and message.rollout.group == shown["group"]
    )
    assert [sample["text"] for sample in shown["samples"]] == list(first.rollout.responses)
    assert [sample["reward"] for sample in shown["samples"]] == first.rewards.numpy().tolist()
    assert shown["prompt"] == first.rollout.prompt_text
    assert set(shown["samples"][0]["components"]) == set(first.components)


def test_newest_step_is_shown_first(tmp_path: Path) -> None:
    shown = browser(recorded_run(tmp_path)).open(None, None)
    assert shown["step"] == 6
    assert shown["steps"] == list(range(7))


def test_group_can_be_chosen(tmp_path: Path) -> None:
    samples = browser(recorded_run(tmp_path))
    group = samples.open(6, None)["groups"][-1]["group"]
    assert samples.open(6, group)["group"] == group


def test_records_that_are_not_there_are_explained(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    shutil.rmtree(run_dir / "archive")
    (run_dir / "spool.sqlite").unlink()
    samples = browser(run_dir)
    assert samples.open(3, None)["reason"] == "step 3 is not in the spool or the archive"
    assert samples.open(None, None)["step"] is None


def test_damaged_archive_is_named(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    path = run_dir / "archive/step_00000002.msgpack"
    path.write_bytes(path.read_bytes()[:-3])
    shown = browser(run_dir).open(2, None)
    assert shown["samples"] == []
    assert "is damaged" in shown["reason"]

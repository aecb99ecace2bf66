"""Tests that samples are found by step and by group, in archive and spool, with text that is harmless."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.codec import decode_payload, encode_payload
from protocol.errors import ProtocolError, SettingsError
from protocol.messages import Remark, ScoredRollout
from protocol.tensors import Array
from services.ledger.event_log.reader import read_events
from services.ledger.event_log.trace import trace
from services.run_record.group_facts import describe_group
from services.run_record.samples import MAX_GROUPS, SampleBrowser, find_samples, samples_of_group
from services.run_record.tail import EventTail
from services.tools.samples import render_group_samples, render_samples
from tests.protocol.samples import SAMPLES
from tests.services.monitor.runs import put_branched, recorded_run
from trainer.storage.archive import Archive
from trainer.storage.stored import StoredMessage


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return recorded_run(tmp_path)


def test_samples_of_the_newest_step_are_shown_up_to_the_limit(run_dir: Path) -> None:
    facts = find_samples(run_dir, None, None, 10)
    assert facts["step"] == 6
    assert [len(group["samples"]) for group in facts["groups"]] == [8, 2]
    assert facts["left_out"] == 14
    assert json.loads(json.dumps(facts))["groups"][0]["prompt"] == facts["groups"][0]["prompt"]


@pytest.mark.parametrize("step", range(7))
def test_samples_of_a_step_can_be_chosen(run_dir: Path, step: int) -> None:
    assert find_samples(run_dir, step, None, 1)["step"] == step


def test_samples_of_a_group_need_no_step(run_dir: Path) -> None:
    facts = find_samples(run_dir, None, 5, 100)
    assert (facts["step"], [group["group"] for group in facts["groups"]]) == (1, [5])
    sample = facts["groups"][0]["samples"][0]
    assert sample["spans"] == [(0, sample["tokens"], 0)]
    assert set(sample["components"]) == {"exact_match", "last_integer"}
    assert sample["finish_reason"] in ("stop", "length")


def test_samples_of_a_trace_are_those_of_the_group(run_dir: Path) -> None:
    moments = trace(read_events(run_dir / "audit.jsonl"), 5)
    facts = samples_of_group(run_dir, 5, moments)
    assert facts["groups"] == find_samples(run_dir, None, 5, 100)["groups"]


@pytest.mark.parametrize(
    ("step", "group", "says"),
    [
        (99, None, "step 99 has no samples in .*; there are those of steps 0 to 6"),
        (None, 9999, "group 9999 is not in the log of .*; groups 0 to 20 are: it was never leased, .*"),
        (6, 2, "step 6 did not train group 2; its groups: 18, 19, 20"),
    ],
)
def test_samples_that_are_missing_are_explained(
    run_dir: Path, step: int | None, group: int | None, says: str
) -> None:
    with pytest.raises(SettingsError, match=f"^{says}$"):
        find_samples(run_dir, step, group, 8)


def test_a_group_is_found_wherever_it_stands_in_a_large_step(run_dir: Path) -> None:
    archive = Archive(run_dir / "archive", 100)
    message = decode_payload(archive.records(2)[0].payload)
    assert isinstance(message, ScoredRollout)
    groups = [msgspec.structs.replace(message.rollout, group=1000 + number) for number in range(MAX_GROUPS)]
    last = msgspec.structs.replace(message.rollout, group=6)  # group 6 is of step 2
    records = [
        StoredMessage.received(
            rollout.group, rollout.token, encode_payload(msgspec.structs.replace(message, rollout=rollout))
        )
        for rollout in (*groups, last)
    ]
    (run_dir / "spool.sqlite").unlink()
    archive.put(2, records)
    for step in (2, None):
        assert [group["group"] for group in find_samples(run_dir, step, 6, 8)["groups"]] == [6]
    with pytest.raises(SettingsError, match="step 2 did not train group 5; its groups: 1000, 1001, "):
        find_samples(run_dir, 2, 5, 8)
    facts = find_samples(run_dir, 2, None, 8)
    samples = len(message.rewards.numpy())
    assert sum(len(group["samples"]) for group in facts["groups"]) == 8
    assert facts["left_out"] == (MAX_GROUPS + 1) * samples - 8


@pytest.mark.parametrize("field", ["rewards", "components"])
def test_a_record_whose_arrays_contradict_each_other_is_named(run_dir: Path, field: str) -> None:
    archive = Archive(run_dir / "archive", 100)
    record = archive.records(2)[0]
    message = decode_payload(record.payload)
    assert isinstance(message, ScoredRollout)
    one = Array.of(message.rewards.numpy()[:1], "float32")
    changes: dict[str, Any] = {"rewards": one} if field == "rewards" else {"components": {"math": one}}
    changed = encode_payload(msgspec.structs.replace(message, **changes))
    (run_dir / "spool.sqlite").unlink()
    archive.put(2, [StoredMessage.received(record.group, record.token, changed)])
    problem = f"group {record.group}: .* has shape .1., not .8."
    with pytest.raises(ProtocolError, match=problem):
        find_samples(run_dir, 2, None, 8)
    shown = SampleBrowser(run_dir, EventTail(run_dir)).open(2, None)
    assert re.fullmatch(f"step 2: {problem}", shown["reason"])


def test_turns_that_were_scored_are_shown_below_their_sample() -> None:
    message = SAMPLES["scored"]
    assert isinstance(message, ScoredRollout)
    group = describe_group(message, 5)
    assert [len(sample["turns"]) for sample in group["samples"]] == [2, 1]
    assert group["samples"][0]["turns"][1] == {
        "reward": -0.5, "components": {"steps": -0.5}, "tokens": 1, "text": "b", "context": "",
        "is_cut": False,
    }  # fmt: skip
    shown = render_samples({"step": 5, "groups": [json.loads(json.dumps(group))], "left_out": 0})
    assert "    turn 0: reward 0.500 (steps 0.500), 1 tokens\n         | a\n" in shown
    without = msgspec.structs.replace(message, turn_rewards=None)
    turns = [turn for sample in describe_group(without, 5)["samples"] for turn in sample["turns"]]
    assert [(turn["reward"], turn["text"]) for turn in turns] == [(None, "a"), (None, "b"), (None, "c")]


def test_an_episode_says_who_said_what_and_an_empty_answer_that_it_is_one() -> None:
    message = SAMPLES["scored"]
    assert isinstance(message, ScoredRollout)
    said = msgspec.structs.replace(
        message.rollout, responses=("abyc", ""), turn_contexts=("", "try again", ""), row_texts=()
    )
    group = describe_group(msgspec.structs.replace(message, rollout=said, turn_rewards=None), 5)
    shown = render_samples({"step": 5, "groups": [json.loads(json.dumps(group))], "left_out": 0})
    assert "         | a\n    before it:\n         | try again\n    turn 1: 1 tokens\n         | b" in shown
    assert "abyc" not in shown
    empty, blank = (
        msgspec.structs.replace(said, turns=None, turn_texts=(), turn_contexts=(), responses=(text, "x"))
        for text in ("", " \n")
    )
    for rollout, words in ((empty, "           empty\n"), (blank, '           blank: " \\n"\n')):
        group = describe_group(msgspec.structs.replace(message, rollout=rollout, turn_rewards=None), 5)
        assert words in render_samples({"step": 5, "groups": [json.loads(json.dumps(group))], "left_out": 0})


def test_samples_of_a_group_that_was_accepted_come_from_the_spool(run_dir: Path) -> None:
    log = run_dir / "audit.jsonl"
    before_the_last_step = log.read_text().partition('"groups":[18,19,20]')[0].rpartition("\n")[0]
    log.write_text(before_the_last_step + "\n")
    facts = find_samples(run_dir, None, 20, 1)
    assert (facts["step"], facts["left_out"]) == (None, 7)
    assert render_samples(facts).startswith("group 20, not trained yet\n")


def test_samples_of_a_dropped_group_are_not_kept(run_dir: Path) -> None:
    event = {"seq": 10**6, "time_ms": 1, "event": "drop", "group": 22, "token": "", "reason": "stale",
             "detail": "", "wasted_tokens": 0, "from": "scored"}  # fmt: skip
    with (run_dir / "audit.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    with pytest.raises(SettingsError, match=r"^group 22 is dropped \(stale\): only groups that are scored"):
        find_samples(run_dir, None, 22, 1)


def test_samples_without_records_say_what_is_kept(run_dir: Path) -> None:
    (run_dir / "spool.sqlite").unlink()
    (run_dir / "archive/step_00000001.msgpack").unlink()
    with pytest.raises(SettingsError, match=r"group 5 was trained in step 1, whose records are not kept"):
        find_samples(run_dir, None, 5, 8)
    moments = trace(read_events(run_dir / "audit.jsonl"), 5)
    assert "records are not kept" in render_group_samples(run_dir, 5, moments)
    shutil.rmtree(run_dir / "archive")
    with pytest.raises(SettingsError, match=r"no step of .* has samples"):
        find_samples(run_dir, None, None, 8)


def test_samples_of_no_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no event log .*; give the directory of a run"):
        find_samples(tmp_path, None, None, 8)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["/proc/self/mem", "audit.jsonl", "."])
def test_samples_name_a_log_that_cannot_be_read(run_dir: Path, target: str) -> None:
    shutil.rmtree(run_dir / "archive")
    log = run_dir / "audit.jsonl"
    log.unlink()
    log.symlink_to(target)
    with pytest.raises(SettingsError, match=f"^no event log {log}: "):
        find_samples(run_dir, None, None, 8)


def test_samples_cannot_drive_the_terminal(run_dir: Path) -> None:
    archive = Archive(run_dir / "archive", 100)
    record = archive.records(2)[0]
    message = decode_payload(record.payload)
    assert isinstance(message, ScoredRollout)
    evil = "\x1b[2J\x1b]52;c;eA==\x07line\rover\n  sample 9: reward 1.000"
    responses = (evil, *message.rollout.responses[1:])
    rollout = msgspec.structs.replace(message.rollout, responses=responses, prompt_text=evil)
    changed = encode_payload(msgspec.structs.replace(message, rollout=rollout))
    (run_dir / "spool.sqlite").unlink()
    archive.put(2, [StoredMessage.received(record.group, record.token, changed)])
    text = render_samples(find_samples(run_dir, 2, None, 1))
    assert text.replace("\n", "").isprintable()
    assert "| \\x1b[2J\\x1b]52;c;eA==\\x07line\\x0dover\n         |   sample 9: reward 1.000" in text


def test_branches_of_a_sample_are_shown(run_dir: Path) -> None:
    facts = find_samples(run_dir, 2, put_branched(run_dir), 1)
    first = facts["groups"][0]["samples"][0]
    assert first["branches"] == [
        {"tokens": 2, "sampled": 2, "parent": None, "shared": 0},
        {"tokens": 2, "sampled": 1, "parent": 0, "shared": 1},
    ]
    assert facts["left_out"] == 1  # samples, not rows
    text = render_samples(facts)
    assert (
        "    branch 0: 2 tokens, 2 sampled\n         | ab\n"
        "    branch 1: 2 tokens, 1 sampled, behind 1 of branch 0\n         | ?d\n  answer | ab\n" in text
    )
    assert first["tokens"] == 4


def test_a_sample_of_one_row_shows_no_branches(run_dir: Path) -> None:
    facts = find_samples(run_dir, 2, put_branched(run_dir), 2)
    second = facts["groups"][0]["samples"][1]
    assert (second["branches"], second["rows"], second["text"]) == ([], ["c"], "c")


FILTERED = {"seq": 10**6, "time_ms": 1, "event": "drop", "group": 22, "token": "", "reason": "no_signal",
            "detail": "", "wasted_tokens": 30, "reward": 1.0, "from": "leased"}  # fmt: skip


def log(run_dir: Path, **changes: object) -> None:
    """Append the drop of a group without signal."""
    with (run_dir / "audit.jsonl").open("a") as file:
        file.write(json.dumps({**FILTERED, **changes}) + "\n")


def test_a_filtered_group_is_shown_with_its_reason(run_dir: Path) -> None:
    log(run_dir)
    facts = find_samples(run_dir, None, 22, 1)
    assert facts == {
        "step": None,
        "groups": [],
        "left_out": 0,
        "filtered": [{"group": 22, "step": None, "reward": 1.0, "tokens": 30}],
    }
    text = render_samples(facts)
    assert text == (
        "group 22 was filtered (no_signal): its mean reward was 1.000, 30 tokens; its text is not kept"
    )
    assert render_group_samples(run_dir, 22, trace(read_events(run_dir / "audit.jsonl"), 22)) == text


def test_groups_that_were_filtered_before_a_step_are_shown_with_it(run_dir: Path) -> None:
    path = run_dir / "audit.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    commit = next(i for i, line in enumerate(lines) if json.loads(line)["event"] == "commit")
    path.write_text("".join(lines[:commit]))
    for group in range(100, 122):
        log(run_dir, group=group)
    with path.open("a") as file:
        file.writelines(lines[commit:])
    assert find_samples(run_dir, 1, None, 1)["filtered"] == []
    facts = find_samples(run_dir, 0, None, 1)
    assert [group["group"] for group in facts["filtered"]] == list(range(100, 122))
    text = render_samples(facts)
    assert "\ngroup 100 was filtered, before step 0 was made (no_signal): its mean reward" in text
    assert text.endswith("\n2 more groups were filtered: see --json")


def test_a_run_that_filtered_all_groups_says_so(run_dir: Path) -> None:
    for name in ("archive", "spool.sqlite"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    (run_dir / "spool.sqlite").unlink(missing_ok=True)
    log(run_dir)
    with pytest.raises(SettingsError, match=r"no step of .* has samples yet.*; 1 groups were filtered"):
        find_samples(run_dir, None, None, 8)


def test_remark_of_a_judge_is_shown_with_its_sample(run_dir: Path) -> None:
    archive = Archive(run_dir / "archive", 100)
    record = archive.records(2)[0]
    message = decode_payload(record.payload)
    assert isinstance(message, ScoredRollout)
    remarks = (
        Remark(verifier="ranking", text="[1, 0]", prompt_tokens=7),
        Remark(verifier="quality", sample=1, text="Poor.\x1b", prompt_tokens=9, cost=0.5, is_cached=True),
    )
    changed = encode_payload(msgspec.structs.replace(message, remarks=remarks))
    (run_dir / "spool.sqlite").unlink()
    archive.put(2, [StoredMessage.received(record.group, record.token, changed)])
    facts = find_samples(run_dir, 2, record.group, 3)
    said = [[remark["verifier"] for remark in sample["remarks"]] for sample in facts["groups"][0]["samples"]]
    assert said == [["ranking"], ["ranking", "quality"], ["ranking"]]
    text = render_samples(facts)
    assert text.count("ranking said of all samples, 7 tokens:\n         | [1, 0]") == 1
    assert "quality said (cached), 9 tokens, cost 0.500000:\n         | Poor.\\x1b" in text

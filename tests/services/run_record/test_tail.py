"""The end of the event log: sentences, versions, bounds, drops; of a recorded run and of a long log."""

import json
from pathlib import Path

import pytest

from services.ledger.event_log.archiver import FILE
from services.ledger.event_log.events import (
    GroupEvent,
    LeasedGroupEvent,
    LedgerEvent,
    decode_fields,
    decode_line,
)
from services.run_record.sentences import _RULES, TOPICS, sentence_of
from services.run_record.tail import KEPT_SENTENCES, EventTail
from tests.services.monitor.runs import recorded_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return recorded_run(tmp_path)


def test_recorded_run_is_known_from_its_log(run_dir: Path) -> None:
    state = EventTail(run_dir).read_all().state()
    assert state["version"] == 7
    assert (state["issued"], state["trained"], state["dropped"]) == (21, 21, 0)
    assert state["bound"] == {"max_staleness": 2, "groups_per_step": 3, "policy": "mask"}
    assert state["drops_since_event"] == 0


def test_a_rebuild_tells_of_steps_that_the_log_has_lost(run_dir: Path) -> None:
    event = {"seq": 10**6, "time_ms": 1, "event": "rebuild", "epoch": "e9", "after": 1, "version": 8,
             "issued": 25, "trained": 24, "dropped": 0}  # fmt: skip
    with (run_dir / FILE).open("a") as file:
        file.write(json.dumps(event) + "\n")
    state = EventTail(run_dir).read_all().state()
    names = ("epoch", "version", "issued", "trained", "dropped", "active")
    assert [state[name] for name in names] == ["e9", 8, 25, 24, 0, 1]


def test_every_event_has_a_sentence(run_dir: Path) -> None:
    for line in (run_dir / FILE).read_text().splitlines():
        sentence = sentence_of(decode_line(line.encode()))
        assert "lacks" not in sentence.text
        assert sentence.text.endswith(".")


def test_every_kind_of_event_has_a_rule() -> None:
    assert set(subclasses(LedgerEvent)) - {GroupEvent, LeasedGroupEvent} == set(_RULES)


def subclasses(kind: type) -> list[type]:
    return [found for child in kind.__subclasses__() for found in (child, *subclasses(child))]


def test_sentences_come_in_increments(run_dir: Path) -> None:
    tail = EventTail(run_dir).read_all()
    whole = tail.sentences(0, TOPICS, 1000)
    assert [event["seq"] for event in whole["events"]] == list(range(1, whole["last"] + 1))
    later = tail.sentences(whole["last"] - 2, TOPICS, 1000)["events"]
    assert later == whole["events"][-2:]
    assert tail.sentences(whole["last"], TOPICS, 1000)["events"] == []
    assert tail.sentences(0, TOPICS, 5)["events"] == whole["events"][-5:]


def test_bound_over_time_is_that_of_the_leases(run_dir: Path) -> None:
    assert [bound[1] for bound in EventTail(run_dir).read_all().bounds()] == [1, 2]


def test_versions_are_sent_once(run_dir: Path) -> None:
    tail = EventTail(run_dir).read_all()
    answer = tail.versions(0)
    assert [version for version, _ in answer["commits"]] == [1, 2, 3, 4, 5, 6, 7]
    assert all(item["served"] for item in answer["engines"])
    events = [json.loads(line) for line in (run_dir / FILE).read_text().splitlines()]
    last = {item["engine"]: item["last_ms"] for item in answer["engines"]}
    assert last == {event["engine"]: event["time_ms"] for event in events if event.get("engine") in last}
    assert tail.versions(answer["last"]) == {"last": answer["last"], "unchanged": True}


def test_long_log_is_read_from_its_end(run_dir: Path) -> None:
    path = run_dir / FILE
    drop = {
        "event": "drop",
        "token": "t",
        "from": "scored",
        "reason": "stale",
        "detail": "",
        "wasted_tokens": 1,
    }
    with path.open("a") as file:
        for seq in range(1000, 6000):
            file.write(json.dumps({**drop, "seq": seq, "time_ms": seq, "group": seq}) + "\n")
    tail = EventTail(run_dir, tail_bytes=200_000).read_all()
    state = tail.state()
    assert state["drops_since_event"] > 1000
    assert 0 < state["dropped_by_reason"]["stale"] < 5000
    assert state["wasted_by_reason"] == state["dropped_by_reason"]
    shown = tail.sentences(0, TOPICS, 10_000)["events"]
    assert shown[0]["kind"] == "create"
    assert len(shown) == 1 + KEPT_SENTENCES


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    lines = [
        b"\xff\n",
        b"[]\n",
        b'{"event":"commit","seq":1,"time_ms":1}\n',
        b'{"event":"new_kind","seq":2,"time_ms":1}\n',
        b'{"event":"applied","seq":3,"time_ms":1,"engine":"a.b","version":4,"epoch":"e"}\n',
    ]
    (tmp_path / FILE).write_bytes(b"".join(lines))
    tail = EventTail(tmp_path).read_all()
    assert [event["text"] for event in tail.sentences(0, TOPICS, 10)["events"]] == [
        "Event commit lacks some of its fields.",
        "Event new_kind.",
        "a serves version 4.",
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"event": "commit", "step": 8, "version": 9, "issued": 99, "trained": 99},
        {"event": "resume", "epoch": "e9", "version": "0", "digest": "1", "continued": False},
        {"event": "drop", "group": 1, "token": "", "reason": "stale", "wasted_tokens": "many"},
        {"event": "halt", "reason": 7},
        {"event": "claim"},
    ],
)
def test_a_damaged_event_changes_no_state(run_dir: Path, fields: dict[str, object]) -> None:
    before = EventTail(run_dir).read_all().state()
    with (run_dir / FILE).open("a") as file:
        file.write(json.dumps({"seq": 10**6, "time_ms": 5, **fields}) + "\n")
    tail = EventTail(run_dir).read_all()
    assert tail.state() == {**before, "time_ms": 5}
    assert tail.sentences(0, TOPICS, 1)["events"] == [
        {"seq": 10**6, "time_ms": 5, "kind": fields["event"], "topic": "run", "level": "warn",
         "text": f"Event {fields['event']} lacks some of its fields."}
    ]  # fmt: skip


def test_a_filtered_group_has_a_sentence_of_its_own() -> None:
    drop = {"event": "drop", "seq": 1, "time_ms": 1, "group": 5, "token": "t", "from": "leased"}
    fields = {**drop, "reason": "no_signal", "detail": "", "wasted_tokens": 9, "reward": 1.0}
    sentence = sentence_of(decode_fields(fields))
    assert sentence.text == "Group 5 was filtered: its mean reward was 1; 9 tokens wasted."

"""`verify` finds out what was done to a log: by a careful forger, who closes numbers and links up, from what
the events say; of any other, from the links."""

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from services.ledger.event_log.archiver import FILE
from services.ledger.event_log.hash_chain import append, head_path
from services.ledger.verify.verifier import verify
from tests.services.ledger.verify import forgeries
from tests.services.ledger.verify.corruptions import CORRUPTIONS, Corruption
from tests.services.ledger.verify.logs import renumbered, rough_log, verify_events


def test_the_log_that_is_spoilt_is_sound_and_has_what_can_be_spoilt() -> None:
    log = rough_log()
    assert verify_events(log).violations == []
    assert {event["event"] for event in log} >= {
        "create",
        "applied",
        "lease",
        "expire",
        "release",
        "accept",
        "lost",
        "drop",
        "claim",
        "resume",
        "take",
        "commit",
        "publish",
        "bound_pending",
        "bound",
        "checkpoint",
    }
    assert len(CORRUPTIONS) >= 40
    assert forgeries.an_unknown_event in CORRUPTIONS


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
def test_a_careful_forgery_is_found_out_and_named(corrupt: Corruption) -> None:
    log = rough_log()
    says = corrupt(log)
    violations = verify_events(log).violations
    assert any(says in violation for violation in violations), (says, violations[:10])
    assert all(violation.startswith(("seq ", "end")) for violation in violations)


FREE = {
    "lease": {
        "token": "until the group is leased again nobody names it",
        "engine": "one that serves the same",
    },
    "accept": {
        "counts": "more tokens than are trained, or of a group that is not trained",
        "reward": "a number to look at",
    },
    "commit": {
        "groups": "fewer tokens than were accepted, or in another order",
        "digest": "until a trainer resumes there",
    },
    "drop": {
        "reason": "any but stale and straggler",
        "detail": "a text",
        "wasted_tokens": "more than were accepted",
        "reward": "a number to look at",
    },
    "claim": {"untaken": "in another order"},
    "resume": {"digest": "of weights that nobody has named before"},
    "applied": {
        "engine": "that leases nothing then",
        "epoch": "another one of the branch",
        "version": "under which nothing is leased",
    },
    "bound_pending": {
        "max_staleness": "only asked for",
        "groups_per_step": "only asked for",
        "policy": "only asked for",
    },
    "checkpoint": {"version": "any that is committed: it allows fewer rewinds, and no other is in the log"},
    "publish": {"version": "an older one, which engines may serve"},
    "create": {"fingerprint": "a name", "steps": "more than were made"},
    "release": {"reason": "a text"},
}
"""Kind of event -> field -> which edits of it contradict nothing else that the log says. `time_ms` and
`holder` contradict nothing ever."""
NOTHING_LOST = {"applied", "checkpoint", "publish", "bound", "bound_pending"}
"""Events that may be doubled, and most of which may vanish: they move no group."""


def edited(value: Any, data: st.DataObject) -> Any:
    """Another value of the same type, close to the one it was."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + data.draw(st.sampled_from([-2, -1, 1, 2]))
    if isinstance(value, str):
        return data.draw(st.sampled_from([value + "x", value[:-1] + "0", value[:-1] + "1"]))
    key = data.draw(st.sampled_from(range(len(value)) if isinstance(value, list) else sorted(value)))
    changed = copy.deepcopy(value)
    if data.draw(st.booleans()):
        del changed[key]
    else:
        changed[key] = edited(value[key], data)
    return changed


@settings(max_examples=50, derandomize=True)
@given(st.data())
def test_an_edit_of_a_field_is_found_out_or_contradicts_nothing(data: st.DataObject) -> None:
    log = rough_log()
    event = data.draw(st.sampled_from(log))
    field = data.draw(
        st.sampled_from([name for name, value in event.items() if name != "event" and value != []])
    )
    before, event[field] = event[field], edited(event[field], data)
    if event[field] != before and verify_events(log).ok:
        assert field in {"time_ms", "holder", *FREE.get(event["event"], {})}, (event, field, before)


@settings(max_examples=60, derandomize=True)
@given(st.data())
def test_an_event_that_is_doubled_or_taken_out_is_found_out_or_moved_no_group(data: st.DataObject) -> None:
    log = rough_log()
    index = data.draw(st.integers(0, len(log) - 1))
    kind = log[index]["event"]
    log[index : index + 1] = [copy.deepcopy(log[index]) for _ in range(data.draw(st.sampled_from([0, 2])))]
    if verify_events(renumbered(log)).ok:
        assert kind in NOTHING_LOST, (index, kind)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archived log, as it lies in a run's directory."""
    path = tmp_path_factory.mktemp("run") / FILE
    log = rough_log()
    for start in range(0, len(log), 100):
        append(path, [json.dumps(event).encode() for event in log[start : start + 100]])
    assert verify(path).violations == []
    return path


def spoilt(archive: Path, directory: Path, lines: list[bytes]) -> list[str]:
    """Violations in a run whose log has these lines."""
    head_path(directory / FILE).write_bytes(head_path(archive).read_bytes())
    (directory / FILE).write_bytes(b"".join(lines))
    return verify(directory / FILE).violations


@settings(max_examples=60, derandomize=True)
@given(st.data())
def test_any_change_of_an_archived_byte_is_found_out(archive: Path, data: st.DataObject) -> None:
    lines = archive.read_bytes().splitlines(keepends=True)
    index = data.draw(st.integers(0, len(lines) - 1))
    column = data.draw(st.integers(0, len(lines[index]) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != lines[index][column]))
    lines[index] = lines[index][:column] + bytes([byte]) + lines[index][column + 1 :]
    with tempfile.TemporaryDirectory() as directory:
        assert spoilt(archive, Path(directory), lines)


@settings(max_examples=40, derandomize=True)
@given(st.data())
def test_archived_lines_that_are_doubled_swapped_or_taken_out_are_found_out(
    archive: Path, data: st.DataObject
) -> None:
    lines = archive.read_bytes().splitlines(keepends=True)
    index = data.draw(st.integers(0, len(lines) - 2))
    line, following = lines[index : index + 2]
    lines[index : index + 2] = data.draw(
        st.sampled_from([[following], [line, line, following], [following, line]])
    )
    with tempfile.TemporaryDirectory() as directory:
        assert spoilt(archive, Path(directory), lines)


@pytest.mark.parametrize("lost", [1, 5, 300])
def test_a_lost_end_is_found_out(archive: Path, tmp_path: Path, lost: int) -> None:
    lines = archive.read_bytes().splitlines(keepends=True)
    assert spoilt(archive, tmp_path, lines[:-lost]) == [
        "end: the newest line that audit.head names is missing"
    ]


def test_a_log_without_the_file_beside_it_is_still_proven(archive: Path, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(archive.read_bytes())
    assert verify(tmp_path / FILE).violations == []
    head_path(tmp_path / FILE).write_text("nonsense")
    assert len(verify(tmp_path / FILE).violations) == 1

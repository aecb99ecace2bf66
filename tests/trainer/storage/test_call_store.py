"""Stores calls: by their holder, once, bounded, and forgotten."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from protocol.codec import encode_payload
from protocol.messages import Call, Recalled
from tests.protocol.samples import CALL
from trainer.storage import call_store
from trainer.storage.call_store import FULL, NOT_HELD, CallStore, recalled
from trainer.storage.spool import Spool


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CallStore]:
    with closing(Spool(tmp_path / "spool.sqlite")) as spool:
        yield CallStore(spool)


def put(store: CallStore, *made: Call) -> list[str]:
    return store.put_many([(call, encode_payload(call)) for call in made])


def test_only_the_holder_adds_calls(store: CallStore) -> None:
    assert put(store, CALL) == [NOT_HELD]
    store.hold(7, CALL.token)
    assert put(store, CALL, CALL) == ["", ""]
    store.hold(7, "later")
    assert put(store, CALL, replace(CALL, token="later", number=2)) == [NOT_HELD, ""]
    assert (store.is_held(7, CALL.token), store.is_held(7, "later")) == (False, True)
    assert len(store.recall(7, 0)) == 2


def test_a_sample_has_a_bounded_record(store: CallStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_store, "MAX_CALLS", 2)
    store.hold(7, CALL.token)
    made = [replace(CALL, number=number) for number in range(3)]
    assert put(store, *made) == ["", "", FULL]
    assert put(store, replace(CALL, sample=1)) == [""]


def test_calls_are_forgotten_only_without_a_record(store: CallStore, tmp_path: Path) -> None:
    for group in (7, 8, 9):
        store.hold(group, CALL.token)
        put(store, replace(CALL, group=group))
    with closing(Spool(tmp_path / "spool.sqlite")) as spool:
        spool.put_many([(8, CALL.token, b"record")])
    assert store.unscored_groups() == [7, 9]
    assert store.forget_unscored([7, 8]) == 1
    assert store.groups() == [8, 9]
    assert [store.is_held(group, CALL.token) for group in (7, 8, 9)] == [False, True, True]
    assert store.forget_unscored([]) == 0


def test_a_sweep_reads_no_calls(tmp_path: Path) -> None:
    with closing(Spool(tmp_path / "spool.sqlite")) as spool, spool.transaction("read") as connection:
        plan = " ".join(str(row) for row in connection.execute(f"EXPLAIN QUERY PLAN {call_store.UNSCORED}"))
    assert "SCAN calls USING COVERING INDEX" in plan


def test_the_last_attempt_of_the_same_epoch_is_recalled() -> None:
    first, second = replace(CALL, number=0), replace(CALL, number=1, attempt=1)
    assert recalled([], "e1") == Recalled()
    assert recalled([first, second], "e1") == Recalled(calls=(second,), attempt=1, number=2)
    assert recalled([first, second], "e2") == Recalled(attempt=2, number=2)


def test_a_damaged_call_begins_its_sample_anew_and_no_other(
    store: CallStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.hold(7, CALL.token)
    made = [replace(CALL, sample=sample, number=number) for sample in (0, 1) for number in range(3)]
    assert put(store, *made) == [""] * 6
    with closing(sqlite3.connect(tmp_path / "spool.sqlite")) as connection:
        connection.execute("UPDATE calls SET payload = zeroblob(9) WHERE sample = 0 AND number = 1")
        connection.commit()
    assert [call.number for call in store.group_calls([7])] == [0, 2, 0, 1, 2]
    assert (store.recall(7, 0), len(store.recall(7, 1))) == ([], 3)
    assert "calls.damaged group=7 sample=0 numbers=[1] forgotten=3" in caplog.text
    assert put(store, replace(CALL, number=0)) == [""]
    assert len(store.recall(7, 0)) == 1


def test_a_call_that_moved_to_another_sample_is_damaged(store: CallStore, tmp_path: Path) -> None:
    store.hold(7, CALL.token)
    put(store, CALL)
    with closing(sqlite3.connect(tmp_path / "spool.sqlite")) as connection:
        connection.execute("UPDATE calls SET sample = 3")
        connection.commit()
    assert store.recall(7, 3) == []

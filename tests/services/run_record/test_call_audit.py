"""The calls of a run's directory are compared with its records, and what was changed is named."""

import json
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from protocol.codec import decode_payload, encode_payload
from protocol.messages import Call, ScoredRollout
from protocol.tensors import Array
from services.run_record.call_audit import (
    CallAudit,
    audit_calls,
    call_facts,
    calls_of_group,
    read_spool,
    render_calls,
)
from tests.protocol.samples import CALL, RESULT
from tests.rollout.sessions.durable import Worker, play, rollout_of
from trainer.storage.archive import Archive
from trainer.storage.call_store import CallStore
from trainer.storage.spool import Spool
from trainer.storage.stored import StoredMessage

TURNS = 3


async def recorded(run_dir: Path) -> bytes:
    """Write a group with its calls into the spool of a run, and return its record."""
    with closing(Spool(run_dir / "spool.sqlite")) as spool:
        worker = Worker(CallStore(spool), "first")
        record = worker.record()
        await record.begin(replayable=True)
        session = worker.session(record)
        await play(session, TURNS)
        await session.results.keep("dice", 6)
        scored = ScoredRollout(rollout=rollout_of(session, "first"), rewards=Array.of([1.0], "float32"))
        spool.put_many([(1, "first", encode_payload(scored))])
        return encode_payload(scored)


def edit(run_dir: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(run_dir / "spool.sqlite")) as connection:
        connection.execute(statement, values)
        connection.commit()


async def test_calls_in_the_spool_belong_to_their_record(tmp_path: Path) -> None:
    await recorded(tmp_path)
    found = audit_calls(tmp_path)
    assert (found.calls, found.tokens, found.violations, found.results) == (TURNS, 3 * TURNS, (), 1)
    assert [call.number for call in calls_of_group(tmp_path, 1)] == list(range(TURNS + 1))


async def test_a_record_without_calls_answers_for_those_of_its_own_lease_alone(tmp_path: Path) -> None:
    """A lease recorded calls and was lost; the next one was made with `environment.record` off."""
    scored = decode_payload(await recorded(tmp_path))
    assert isinstance(scored, ScoredRollout)

    def audited(token: str) -> CallAudit:
        rollout = msgspec.structs.replace(scored.rollout, token=token, calls=None)
        payload = encode_payload(msgspec.structs.replace(scored, rollout=rollout))
        checksum = StoredMessage.received(1, token, payload).checksum.to_bytes(8)
        edit(tmp_path, "UPDATE records SET token = ?, payload = ?, sum = ?", token, payload, checksum)
        return audit_calls(tmp_path)

    assert audited("second") == CallAudit(0, 0)
    assert audited("first").violations == (
        f"spool: group 1: has {TURNS + 1} journalled calls, but its record names none",
    )


class Overtaken(CallStore):
    """The calls of a spool of which the trainer forgets group 1 just before they are read."""

    def group_calls(self, groups: Iterable[int]) -> list[StoredMessage]:
        with closing(Spool(self._spool.path)) as trainer:
            trainer.forget([1])
        return super().group_calls(groups)


async def test_a_record_that_is_forgotten_meanwhile_is_not_compared(tmp_path: Path) -> None:
    payload = await recorded(tmp_path)
    with closing(Spool(tmp_path / "spool.sqlite", read_only=True)) as spool:
        assert read_spool(spool, CallStore(spool), set())[0] == [payload]
        assert read_spool(spool, CallStore(spool), {1}) == ([], [])
        assert read_spool(spool, Overtaken(spool), set()) == ([], [])


async def test_calls_move_to_the_archive_with_their_record(tmp_path: Path) -> None:
    payload = await recorded(tmp_path)
    with closing(Spool(tmp_path / "spool.sqlite")) as spool:
        store = CallStore(spool)
        Archive(tmp_path / "archive", 1).put(
            0, [StoredMessage.received(1, "first", payload)], store.group_calls([1])
        )
        assert audit_calls(tmp_path).calls == TURNS  # both hold it until the spool forgets
        spool.forget([1])
        assert store.groups() == []
    found = audit_calls(tmp_path)
    assert (found.calls, found.tokens, found.violations) == (TURNS, 3 * TURNS, ())


def changed(call: Call) -> bytes:
    return encode_payload(msgspec.structs.replace(call, spans=Array.of([[3, 7]], "int32")))


FORGERIES: dict[str, tuple[Callable[[Call], bytes], str]] = {
    "version": (changed, "call 1 of sample 0: versions of the record are not those of the journal"),
    "count": (
        lambda call: encode_payload(msgspec.structs.replace(call, tokens=Array.of([1], "int32"))),
        "a journalled call cannot be read",
    ),
    "garbage": (lambda call: b"garbage", "a journalled call cannot be read"),
}


@pytest.mark.parametrize("name", FORGERIES)
async def test_a_changed_call_in_the_spool_is_named(tmp_path: Path, name: str) -> None:
    await recorded(tmp_path)
    forge, problem = FORGERIES[name]
    call = calls_of_group(tmp_path, 1)[1]
    payload = forge(call)
    checksum = StoredMessage.received(1, call.token, payload, call.sample, 1).checksum.to_bytes(8)
    edit(tmp_path, "UPDATE calls SET payload = ?, sum = ? WHERE number = 1", payload, checksum)
    assert any(problem in violation for violation in audit_calls(tmp_path).violations)


async def test_any_changed_byte_of_an_answer_is_found(tmp_path: Path) -> None:
    await recorded(tmp_path)
    call = calls_of_group(tmp_path, 1)[1]
    payload = encode_payload(call)
    for field in (call.tokens, call.logprobs):
        at = payload.index(bytes(field.data))
        for place in range(at, at + len(field.data)):
            forged = payload[:place] + bytes([payload[place] ^ 1]) + payload[place + 1 :]
            assert isinstance(decode_payload(forged), Call)
            edit(tmp_path, "UPDATE calls SET payload = ? WHERE number = 1", forged)
            assert audit_calls(tmp_path).violations


async def test_a_deleted_call_is_named(tmp_path: Path) -> None:
    await recorded(tmp_path)
    edit(tmp_path, "DELETE FROM calls WHERE number = 2")
    assert audit_calls(tmp_path).violations == (
        "spool: group 1: call 2 of sample 0 is in the record, but was not journalled",
    )


def test_calls_have_a_line_each_that_cannot_drive_a_terminal() -> None:
    first, second = render_calls([CALL, msgspec.structs.replace(CALL, engine="\x1b[2J")]).splitlines()
    assert first.startswith("1970-01-01 00:00:01.000  +0.500 s  call     sample 0  number 1  after 0")
    assert "versions 3,4  engine rollout.0.aabbccdd" in first
    assert "\x1b" not in second


def test_a_result_of_a_tool_has_a_line_of_its_own() -> None:
    line = render_calls([msgspec.structs.replace(RESULT, name="a\x1b b")])
    assert "+0.500 s  result   sample 0  number 2  attempt 0  bytes 10  name 'a\\x1b b'  engine" in line
    (fact,) = call_facts([RESULT])
    assert json.loads(json.dumps(fact)) == fact
    assert [fact[name] for name in ("event", "name", "bytes", "tokens", "versions")] == [
        "result", "python 1", 10, 0, [],
    ]  # fmt: skip


def test_calls_are_facts_of_plain_values() -> None:
    (fact,) = call_facts([CALL])
    assert json.loads(json.dumps(fact)) == fact
    assert [fact[name] for name in ("event", "number", "parent", "versions")] == ["call", 1, 0, [3, 4]]
    assert (fact["began_ms"], fact["ended_ms"], fact["tokens"]) == (1000, 1500, CALL.tokens.shape[0])

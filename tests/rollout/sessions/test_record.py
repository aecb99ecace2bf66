"""A session that is abandoned at any call continues where it was, from what is on disk."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from protocol.codec import decode_payload, encode_payload
from protocol.errors import EpisodeError
from protocol.messages import Call, Rollout
from protocol.tensors import Array
from rollout.sessions.record import CallJournal
from rollout.sessions.refusal import RequestRefused
from rollout.sessions.requests import read_chat
from rollout.sessions.sampling import SamplingRules
from rollout.sessions.session import PendingCall, Session
from services.run_record.call_audit import check_group
from tests.rollout.sessions.durable import Killed, Worker, ask, play, rollout_of
from tests.rollout.sessions.hanging import Cancelling, HangingReader, Hung
from trainer.storage.call_store import CallStore
from trainer.storage.spool import Spool

J = TypeVar("J", bound=CallJournal)
TURNS = 20
BEGIN = read_chat({"messages": [{"role": "user", "content": "begin"}]}, rules=SamplingRules())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CallStore]:
    with closing(Spool(tmp_path / "spool.sqlite")) as spool:
        yield CallStore(spool)


def journalled(store: CallStore) -> list[Call]:
    return [call for item in store.group_calls([1]) if isinstance(call := decode_payload(item.payload), Call)]


async def abandon(worker: Worker) -> None:
    """Play until the worker dies."""
    record = worker.record()
    await record.begin(replayable=True)
    with suppress(Killed):
        await play(worker.session(record), TURNS)


@pytest.mark.parametrize("at", range(TURNS))
async def test_an_episode_killed_at_any_call_goes_on_after_it(store: CallStore, at: int) -> None:
    first, second = Worker(store, "first", kill_at=at), Worker(store, "second")
    await abandon(first)
    record = second.record()
    await record.begin(replayable=True)
    session = second.session(record)
    answers = await play(session, TURNS)
    assert answers == first.generated + second.generated
    assert (len(first.generated), record.replayed, record.remaining) == (at + 1, at + 1, 0)
    rollout = rollout_of(session, "second")
    tokens, problems = check_group(rollout, journalled(store))
    assert (tokens, problems) == (3 * TURNS, [])
    assert int(rollout.loss_mask.numpy().sum()) == 3 * TURNS


async def test_an_episode_killed_at_every_call_in_turn_loses_none(store: CallStore) -> None:
    generated = []
    for at in range(TURNS - 1):
        worker = Worker(store, f"worker{at}", kill_at=at)
        await abandon(worker)
        generated += worker.generated
    last = Worker(store, "last")
    record = last.record()
    await record.begin(replayable=True)
    session = last.session(record)
    assert await play(session, TURNS) == generated + last.generated
    assert len(last.generated) == 1
    assert check_group(rollout_of(session, "last"), journalled(store)) == (3 * TURNS, [])


async def test_calls_that_are_not_asked_for_again_are_in_no_sample(store: CallStore) -> None:
    await abandon(Worker(store, "first", kill_at=9))
    second = Worker(store, "second")
    record = second.record()
    await record.begin(replayable=True)
    session = second.session(record)
    await play(session, 12, swerve=4)
    assert (record.replayed, record.remaining, len(second.generated)) == (5, 5, 7)
    rollout = rollout_of(session, "second")
    assert rollout.calls is not None
    without = [number for _, number, row, _, _ in rollout.calls.numpy().tolist() if row == -1]
    assert without == [5, 6, 7, 8, 9]
    assert check_group(rollout, journalled(store)) == (3 * 12, [])


async def test_an_older_token_than_the_lease_is_context(store: CallStore) -> None:
    await abandon(Worker(store, "first", version=3, kill_at=9))
    second = Worker(store, "second", version=4)
    record = second.record()
    await record.begin(replayable=True)
    session = second.session(record)
    await play(session, TURNS)
    rollout = rollout_of(session, "second")
    assert int(rollout.loss_mask.numpy().sum()) == 3 * (TURNS - 10)
    assert check_group(rollout, journalled(store)) == (3 * (TURNS - 10), [])


async def test_calls_of_another_epoch_are_not_replayed(store: CallStore) -> None:
    await abandon(Worker(store, "first", kill_at=3))
    second = Worker(store, "second", epoch="other")
    record = second.record()
    await record.begin(replayable=True)
    session = second.session(record)
    await play(session, 2)
    assert (record.replayed, len(second.generated)) == (0, 2)
    assert check_group(rollout_of(session, "second"), journalled(store)) == (6, [])


async def test_a_lost_lease_records_nothing_and_says_so(store: CallStore) -> None:
    first, second = Worker(store, "first"), Worker(store, "second")
    old = first.record()
    await old.begin(replayable=True)
    session = first.session(old)
    await play(session, 2)
    await second.record().begin(replayable=True)
    with pytest.raises(RequestRefused, match="not_held"):
        await play(session, 1)
    assert len(journalled(store)) == 2


async def test_a_harness_that_must_not_run_twice_is_not_run(store: CallStore) -> None:
    await abandon(Worker(store, "first", kill_at=0))
    record = Worker(store, "second").record()
    for _ in range(2):
        with pytest.raises(EpisodeError, match="1 calls are already recorded"):
            await record.begin(replayable=False)


async def test_a_second_attempt_begins_anew(store: CallStore) -> None:
    await abandon(Worker(store, "first", kill_at=4))
    second = Worker(store, "second")
    record = second.record()
    for attempt in range(2):
        await record.begin(replayable=True)
        session = second.session(record)
        await play(session, TURNS)
        assert record.replayed == (0 if attempt else 5)
    assert check_group(rollout_of(session, "second"), journalled(store)) == (3 * TURNS, [])


@pytest.mark.parametrize("at", range(TURNS))
async def test_a_harness_killed_at_any_call_goes_on_after_it(store: CallStore, at: int) -> None:
    worker = Worker(store, "first", kill_at=at)
    record = worker.record()
    for _ in range(2):
        await record.begin(replayable=True)
        session = worker.session(record)
        with suppress(Killed):  # here of the harness: the lease and its record remain
            await play(session, TURNS)
        record.resume()
    assert (len(worker.generated), record.replayed, record.remaining) == (TURNS, at + 1, 0)
    assert check_group(rollout_of(session, "first"), journalled(store)) == (3 * TURNS, [])
    assert {call.attempt for call in journalled(store)} == {0}


async def test_a_killed_harness_does_not_continue_an_attempt_that_failed(store: CallStore) -> None:
    worker = Worker(store, "first")
    record = worker.record()
    await record.begin(replayable=True)
    await play(worker.session(record), 3)  # and fails
    for turns in (0, 2, 5):  # killed before its first call, and after the second
        await record.begin(replayable=True)
        session = worker.session(record)
        await play(session, turns)
        record.resume()
    assert (len(worker.generated), record.replayed) == (3 + 5, 2)
    assert check_group(rollout_of(session, "first"), journalled(store)) == (3 * 5, [])
    assert [call.attempt for call in journalled(store)] == [0] * 3 + [1] * 5


async def test_a_call_under_way_when_the_harness_was_killed_keeps_its_number(store: CallStore) -> None:
    worker = Worker(store, "first")
    record = worker.record()
    await record.begin(replayable=True)
    await play(worker.session(record), 2)
    record._next += 1  # as after a call that was cancelled on its way to the disk
    record.resume()
    await record.begin(replayable=True)
    session = worker.session(record)
    await play(session, 3)
    late = msgspec.structs.replace(journalled(store)[1], number=2, request="late")
    assert store.put_many([(late, encode_payload(late))]) == [""]
    assert [call.number for call in session.tree.calls] == [0, 1, 3]
    assert check_group(rollout_of(session, "first"), journalled(store)) == (3 * 3, [])


async def test_a_killed_harness_that_must_not_run_twice_is_not_run(store: CallStore) -> None:
    worker = Worker(store, "first")
    record = worker.record()
    await record.begin(replayable=False)
    await play(worker.session(record), 2)
    record.resume()
    with pytest.raises(EpisodeError, match="2 calls are already recorded"):
        await record.begin(replayable=False)


async def test_who_hung_up_gets_the_same_answer(store: CallStore) -> None:
    worker = Worker(store, "first")
    record = worker.record()
    await record.begin(replayable=True)
    session = worker.session(record)
    pending = session.begin(BEGIN)
    answer = await session.answer(pending)
    session.withdraw(pending, answer)
    assert session.tree.calls == []
    again = await session.answer(pending)
    assert (again.call.completion, again.call.number) == (answer.call.completion, 0)
    assert len(worker.generated) == len(journalled(store)) == 1


async def test_an_answer_of_an_ended_session_is_not_of_the_next_attempt(store: CallStore) -> None:
    worker = Worker(store, "first")
    record = worker.record()
    await record.begin(replayable=True)
    session = worker.session(record)
    pending = session.begin(BEGIN)
    answer = await session.answer(pending)
    session.end("its episode is over")
    await session.drained()
    await record.begin(replayable=True)
    session.withdraw(pending, answer)  # its client has not read, and is gone
    again = worker.session(record)
    await play(again, 2)
    assert check_group(rollout_of(again, "first"), journalled(store)) == (6, [])


async def begun_over(worker: Worker, kind: Callable[[CallJournal], J]) -> tuple[Session, J]:
    """Return a new session of a worker over a journal that misbehaves, and that journal."""
    record = worker.record()
    journal = kind(record.recording.journal)
    record.recording = replace(record.recording, journal=journal)
    await record.begin(replayable=True)
    return worker.session(record), journal


async def hang_up(session: Session, pending: PendingCall, reached: asyncio.Event) -> None:
    """Make a call, and cancel it as soon as it is on disk."""
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(session.answer(pending))
        await reached.wait()
        call.cancel()
    assert call.cancelled()
    assert session.tree.calls == []


async def test_a_call_cancelled_while_it_is_stored_is_given_to_who_asks_again(store: CallStore) -> None:
    worker = Worker(store, "first")
    session, journal = await begun_over(worker, Hung)
    await hang_up(session, session.begin(BEGIN), journal.reached)
    answers = await play(session, 3)
    assert answers == worker.generated
    assert check_group(rollout_of(session, "first"), journalled(store)) == (9, [])
    again = Worker(store, "second")
    record = again.record()
    await record.begin(replayable=True)
    assert await play(again.session(record), 3) == answers
    assert (record.replayed, record.remaining, again.generated) == (3, 0, [])


async def test_a_call_cancelled_as_it_is_answered_is_given_to_who_asks_again(store: CallStore) -> None:
    worker = Worker(store, "first")
    session, journal = await begun_over(worker, Cancelling)
    async with asyncio.TaskGroup() as tasks:
        call = journal.caller = tasks.create_task(session.answer(session.begin(BEGIN)))
    assert call.cancelled()
    assert session.tree.calls == []
    assert await play(session, 2) == worker.generated
    assert check_group(rollout_of(session, "first"), journalled(store)) == (6, [])


async def test_a_call_cancelled_while_it_is_read_is_given_to_who_asks_again(store: CallStore) -> None:
    worker, reader = Worker(store, "first"), HangingReader()
    record = worker.record()
    await record.begin(replayable=True)
    session = worker.session(record, reader)
    await hang_up(session, session.begin(BEGIN), reader.reached)
    assert await play(session, 2) == worker.generated
    assert check_group(rollout_of(session, "first"), journalled(store)) == (6, [])


async def test_a_replayed_call_uses_its_turn_once(store: CallStore) -> None:
    await abandon(Worker(store, "first", kill_at=1))
    worker = Worker(store, "second")
    record = worker.record()
    await record.begin(replayable=True)
    session = worker.session(record)
    for _ in range(3):
        pending = session.begin(BEGIN)
        session.withdraw(pending, await session.answer(pending))
    assert (len(worker.replayed), record.replayed) == (1, 1)
    await play(session, 3)
    assert (len(worker.replayed), len(worker.generated)) == (2, 1)


async def complete(store: CallStore) -> tuple[Rollout, list[Call]]:
    worker = Worker(store, "first")
    record = worker.record()
    await record.begin(replayable=True)
    session = worker.session(record)
    await play(session, 3)
    return rollout_of(session, "first"), journalled(store)


FORGERIES = {
    "tokens": lambda call: msgspec.structs.replace(call, tokens=Array.of([1, 2, 3], "int32")),
    "versions": lambda call: msgspec.structs.replace(call, spans=Array.of([[3, 9]], "int32")),
    "log-probabilities": lambda call: msgspec.structs.replace(
        call, logprobs=Array.of([-0.5, -0.25, -1.5], "float32")
    ),
}


@pytest.mark.parametrize("what", FORGERIES)
async def test_a_forged_call_is_named(store: CallStore, what: str) -> None:
    rollout, calls = await complete(store)
    calls[1] = FORGERIES[what](calls[1])
    _, problems = check_group(rollout, calls)
    assert problems == [f"group 1: call 1 of sample 0: {what} of the record are not those of the journal"]


async def test_a_missing_or_surplus_call_is_named(store: CallStore) -> None:
    rollout, calls = await complete(store)
    surplus = msgspec.structs.replace(calls[2], number=3)
    assert check_group(rollout, [*calls, surplus])[1] == ["group 1: call 3 of sample 0 is lost"]
    assert check_group(rollout, calls[:2])[1] == [
        "group 1: call 2 of sample 0 is in the record, but was not journalled"
    ]
    nameless = msgspec.structs.replace(rollout, calls=None)
    assert check_group(nameless, calls)[1] == ["group 1: has 3 journalled calls, but its record names none"]


async def test_a_call_that_is_named_twice_or_not_at_all_is_found(store: CallStore) -> None:
    rollout, calls = await complete(store)
    assert rollout.calls is not None
    rows = rollout.calls.numpy().tolist()
    twice = msgspec.structs.replace(rollout, calls=Array.of([*rows, rows[0]], "int32"))
    problems = check_group(twice, calls)[1]
    assert "group 1: call 0 of sample 0 is named twice" in problems
    assert "group 1: token 0 of row 0 is of two calls" in problems
    none = msgspec.structs.replace(rollout, calls=Array.of(rows[1:], "int32"))
    assert check_group(none, calls)[1] == [
        "group 1: token 0 of row 0 is of no journalled call",
        "group 1: call 0 of sample 0 is lost",
    ]


async def test_a_call_sent_again_is_stored_once(store: CallStore) -> None:
    _, calls = await complete(store)
    stored = store.group_calls([1])
    payloads = [call.payload for call in stored]
    assert store.put_many(list(zip(calls, payloads, strict=True))) == ["", "", ""]
    assert store.group_calls([1]) == stored
    other = msgspec.structs.replace(calls[0], finish_reason="length")
    assert store.put_many([(other, b"other")]) == ["another call with this number is recorded"]


async def test_parallel_calls_are_each_found(store: CallStore) -> None:
    async def fan_out(worker: Worker) -> list[tuple[int, ...]]:
        record = worker.record()
        await record.begin(replayable=True)
        session = worker.session(record)
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(ask(session, [{"role": "user", "content": f"part {i % 3}"}]))
                for i in range(6)
            ]
        return sorted(task.result().call.completion.tokens for task in asked)

    first, second = Worker(store, "first"), Worker(store, "second")
    assert await fan_out(first) == await fan_out(second)
    assert second.generated == []

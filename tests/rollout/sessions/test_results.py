"""What tools answered is given again to who replays an attempt, and to nobody else."""

import asyncio
import io
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from protocol.codec import decode_payload
from protocol.errors import EpisodeError
from protocol.messages import Call
from rollout.sessions import results as limits
from rollout.sessions.refusal import RequestRefused
from rollout.sessions.results import Results
from rollout.sessions.session import Session
from services.run_record.call_audit import check_group
from tests.rollout.sessions.durable import Killed, Worker, ask, rollout_of
from tests.rollout.sessions.hanging import Hung
from tests.rollout.sessions.serving import served
from trainer.storage.call_store import CallStore
from trainer.storage.spool import Spool

TURNS = 4


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CallStore]:
    with closing(Spool(tmp_path / "spool.sqlite")) as spool:
        yield CallStore(spool)


def journalled(store: CallStore) -> list[Call]:
    return [call for item in store.group_calls([1]) if isinstance(call := decode_payload(item.payload), Call)]


class Dice:
    """A tool that answers each time something else."""

    def __init__(self) -> None:
        self.thrown = 0

    async def throw(self) -> int:
        self.thrown += 1
        return self.thrown


async def play(session: Session, dice: Dice) -> list[Any]:
    """Play turns with a tool between them; returns the transcript."""
    messages: list[Any] = [{"role": "user", "content": "begin"}]
    for turn in range(TURNS):
        answer = await ask(session, messages)
        thrown = await session.results.once(f"turn {turn}", dice.throw)
        messages += [answer.message, {"role": "user", "content": f"dice: {thrown}"}]
    return messages


async def begun(worker: Worker) -> Session:
    record = worker.record()
    await record.begin(replayable=True)
    return worker.session(record)


@pytest.mark.parametrize("at", range(2 * TURNS))
async def test_a_tool_runs_once_if_its_worker_is_killed(store: CallStore, at: int) -> None:
    dice = Dice()
    with suppress(Killed):
        await play(await begun(Worker(store, "first", kill_at=at)), dice)
    second = Worker(store, "second")
    session = await begun(second)
    transcript = await play(session, dice)
    assert dice.thrown == TURNS
    assert [line["content"] for line in transcript[2::2]] == [f"dice: {i + 1}" for i in range(TURNS)]
    assert (len(second.generated), session.record and session.record.remaining) == (TURNS - 1 - at // 2, 0)
    assert check_group(rollout_of(session, "second"), journalled(store)) == (3 * TURNS, [])


async def test_results_of_an_attempt_that_failed_are_not_used(store: CallStore) -> None:
    dice, worker = Dice(), Worker(store, "first")
    record = worker.record()
    for attempt in range(2):
        await record.begin(replayable=True)
        session = worker.session(record)
        await play(session, dice)
        assert dice.thrown == TURNS * (attempt + 1)
    assert check_group(rollout_of(session, "first"), journalled(store)) == (3 * TURNS, [])


async def test_results_of_another_epoch_are_not_used(store: CallStore) -> None:
    dice = Dice()
    with suppress(Killed):
        await play(await begun(Worker(store, "first", kill_at=3)), dice)
    await play(await begun(Worker(store, "second", epoch="other")), dice)
    assert dice.thrown == 2 + TURNS


async def test_a_lost_lease_records_no_result(store: CallStore) -> None:
    first = await begun(Worker(store, "first"))
    await begun(Worker(store, "second"))
    with pytest.raises(EpisodeError, match="not_held"):
        await first.results.once("a", Dice().throw)
    assert journalled(store) == []


async def test_of_results_with_one_name_the_last_is_recalled(store: CallStore) -> None:
    """The first was on its way to the disk when its harness was killed: nobody has seen it."""
    worker = Worker(store, "first")
    record = worker.record()
    await record.begin(replayable=True)
    for value in (b"1", b"2"):
        await record.recording.journal.store(record.result("a", value, 0))
    assert await (await begun(Worker(store, "second"))).results.find("a") == b"2"


async def test_a_result_cancelled_while_it_is_stored_is_given_to_who_asks_again(store: CallStore) -> None:
    worker, dice = Worker(store, "first"), Dice()
    record = worker.record()
    journal = Hung(record.recording.journal)
    record.recording = replace(record.recording, journal=journal)
    await record.begin(replayable=True)
    results = worker.session(record).results
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(results.once("a", dice.throw))
        await journal.reached.wait()
        task.cancel()
    assert task.cancelled()
    assert [await results.once("a", dice.throw), dice.thrown, len(journalled(store))] == [1, 1, 1]


async def test_a_session_that_ends_does_not_wait_for_a_result(store: CallStore) -> None:
    worker = Worker(store, "first")
    record = worker.record()
    journal = Hung(record.recording.journal)
    record.recording = replace(record.recording, journal=journal)
    await record.begin(replayable=True)
    session = worker.session(record)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(refused(session.results.keep("a", 1)))
        await journal.reached.wait()
        session.end("its group was dropped")
    assert str(task.result()) == "the session has ended: its group was dropped"
    assert record.abandoned([]) == [0]  # it may be on disk, and is of no sample's tokens


async def refused(waiting: Awaitable[object]) -> RequestRefused:
    with pytest.raises(RequestRefused) as found:
        await waiting
    return found.value


async def test_who_asks_at_once_gets_the_result_of_one_run() -> None:
    results, dice = Results(), Dice()
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(results.once("a", dice.throw)) for _ in range(5)]
    assert [task.result() for task in asked] == [1] * 5


async def test_a_tool_that_raises_leaves_no_result() -> None:
    results, answers = Results(), itertools.count()

    async def fail_first() -> tuple[int, str]:
        if not next(answers):
            raise OSError("no network")
        return 1, "as JSON has it"

    with pytest.raises(OSError, match="no network"):
        await results.once("a", fail_first)
    assert await results.once("a", fail_first) == [1, "as JSON has it"]


Keep = Callable[[Results], Awaitable[object]]
REFUSED: dict[str, tuple[Keep, int, str]] = {
    "no name": (lambda results: results.keep("", 1), 400, "1 to 256 printable characters, not ''"),
    "a long name": (lambda results: results.find("a" * 257), 400, "1 to 256 printable"),
    "a name of no text": (lambda results: results.keep("\ud800", 1), 400, r"not '\\ud800'"),
    "not a number": (lambda results: results.keep("a", float("nan")), 400, "'a' is not a JSON value: Out of"),
    "an object": (lambda results: results.keep("a", object()), 400, "'a' is not a JSON value: Object of"),
    "another value": (lambda results: results.keep("known", 2), 409, "another result is recorded as 'known'"),
    "one too many": (lambda results: results.keep("third", 1), 403, "at most 2 results and 0 MiB"),
    "too large": (lambda results: results.keep("a", "x" * 999), 403, "'a' of 1001 bytes exceeds the limit"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_a_result_that_does_not_fit_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_RESULTS", 2 if what == "one too many" else 100)
    monkeypatch.setattr(limits, "MAX_BYTES", 1000)
    keep, status, why = REFUSED[what]
    results = Results()
    for name in ("known", "other"):
        assert await results.keep(name, 1) == b"1"
    with pytest.raises(RequestRefused, match=why) as found:
        await keep(results)
    assert found.value.status == status
    assert [await results.find(name) for name in ("known", "other", "third", "a")] == [b"1", b"1", None, None]


async def test_a_lost_or_forged_result_is_named(store: CallStore) -> None:
    session = await begun(Worker(store, "first"))
    await play(session, Dice())
    rollout, calls = rollout_of(session, "first"), journalled(store)
    more = msgspec.structs.replace(calls[1], number=99, name="more\x1b")
    assert check_group(rollout, [*calls, more])[1] == ["group 1: result 'more\\x1b' of sample 0 is lost"]
    assert check_group(rollout, [calls[0], *calls[2:]])[1] == []  # a result that nobody saw may be missing
    forged = msgspec.structs.replace(calls[0], name="forged", result=b"1")
    assert check_group(rollout, [forged, *calls[1:]])[1][0] == (
        "group 1: call 0 of sample 0 is the result of a tool, and the record has tokens of it"
    )


async def test_a_result_of_a_tool_is_recorded_by_its_name() -> None:
    async with served(body_mb=1) as (_, session, endpoint, key), aiohttp.ClientSession() as http:
        url = f"{endpoint.url(key)}/results"

        async def tried(method: str, name: str, data: Any = None) -> tuple[int, Any]:
            async with http.request(method, f"{url}/{name}", data=data) as response:
                return response.status, await response.json()

        async def code(method: str, name: str, data: Any = None) -> tuple[int, str]:
            status, body = await tried(method, name, data)
            return status, body["error"]["code"]

        assert await code("GET", "a%20b%2Fc") == (404, "not_recorded")
        for _ in range(2):
            assert await tried("PUT", "a%20b%2Fc", b'{"x": [1, "\\u00e4"]}') == (200, {"x": [1, "ä"]})
        assert await tried("GET", "a%20b%2Fc") == (200, {"x": [1, "ä"]})
        assert await session.results.find("a b/c") == b'{"x": [1, "\\u00e4"]}'
        assert await code("PUT", "a%20b%2Fc", b"null") == (409, "already_recorded")
        assert await tried("PUT", "none", b"null") == (200, None)
        assert await tried("GET", "none") == (200, None)
        assert await code("PUT", "x", b"{") == (400, "invalid_json")
        assert await code("PUT", "x", b"NaN") == (400, "invalid_json")
        assert await code("PUT", "x" * 257, b"1") == (400, "invalid_value")
        assert await code("PUT", "x", io.BytesIO(b" " * (2**20 + 1))) == (413, "body_too_large")
        endpoint.end(key, "its episode is over")
        assert await code("GET", "none") == (410, "session_ended")

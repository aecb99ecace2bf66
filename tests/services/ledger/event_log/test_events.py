"""Events keep their format on disk: archived lines of every kind are written byte for byte as before.

`golden/memory.jsonl` and `golden/valkey.jsonl` are archives of the run that `every_kind` makes.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from protocol.staleness import Policy
from services.ledger.event_log.archiver import FILE, Archiver
from services.ledger.event_log.events import (
    KnownEvent,
    MalformedEvent,
    UnknownEvent,
    decode_fields,
    decode_line,
)
from services.ledger.verify.verifier import verify
from tests.contracts.ledger_rebuild import journal_of, restored, small
from tests.contracts.ledger_rig import Driver, MemoryRig, RedisRig, Rig, spec
from tests.contracts.memory_ledger.event_fields import fields_of

GOLDEN = Path(__file__).parent / "golden"
KINDS = {
    "create",
    "steps",
    "applied",
    "lease",
    "expire",
    "extend",
    "release",
    "accept",
    "lost",
    "drop",
    "halt",
    "unhalt",
    "claim",
    "resume",
    "rebuild",
    "take",
    "commit",
    "publish",
    "bound_pending",
    "bound",
    "drain",
    "checkpoint",
}
RUN = {"E": 2, "B": 2, "prompts": 100, "drop_window": 3, "drop_share": 0.6}


def tokens() -> dict[str, Any]:
    """Lease tokens `t0`, `t1`, ... for a ledger under test."""
    numbers = itertools.count()
    return {"tokens": lambda: f"t{next(numbers)}"}


def memory_rig() -> Rig:
    """A ledger in memory whose clock advances by 7 ms at every look."""
    clock = itertools.count(1_700_000_000_000, 7)
    return MemoryRig(clock=lambda: next(clock), **tokens())


async def every_kind(rig: Rig, directory: Path) -> bytes:
    """Make a run that writes every kind of event, and return its archive."""
    driver = await Driver(rig).begin(**RUN)
    ledger = rig.ledger
    await ledger.create(spec(rig.run, steps=200, **RUN))
    await ledger.publish("e1", b"manifest", 0)
    rewarded, plain = await driver.lease(), await driver.lease()
    await ledger.accept(rewarded.group, rewarded.token, {0: 7, 1: 0}, 0.25)
    await ledger.accept(plain.group, plain.token, {0: 3})
    await driver.commit(await ledger.take("e1"))
    await ledger.applied("eng", "e1", 1)
    await release_and_lose(driver)
    await crash_and_rewind(driver)
    await halt_and_drain(driver)
    await change_the_bound(driver)
    await Archiver(ledger, directory).archive_all()
    await lose_writes(driver, directory)
    await Archiver(ledger, directory).archive_all()
    return (directory / FILE).read_bytes()


async def release_and_lose(driver: Driver) -> None:
    """One group is released; the lease of another expires and is extended, and its record is lost."""
    released, late = await driver.lease(), await driver.lease()
    await driver.ledger.release(released.group, released.token, "no room")
    await driver.reaped(late)
    await driver.ledger.extend(late.group, late.token, 600_000)
    await driver.ledger.accept(late.group, late.token, {1: 4}, 1.0)
    await driver.ledger.lost(late.group, late.token)


async def crash_and_rewind(driver: Driver) -> None:
    """A trainer crashes within a step and continues; the next one resumes at an older version."""
    ledger = driver.ledger
    await driver.scored(2)
    await ledger.take("e1")
    await ledger.claim("e2")
    assert await ledger.resume("e2", 1, 100)
    await driver.commit(await ledger.take("e2"), "e2", 2**64 - 1)
    await ledger.checkpointed(1)
    await ledger.claim("e3")
    assert not await ledger.resume("e3", 1, 100)
    await ledger.applied("eng", "e3", 1)


async def halt_and_drain(driver: Driver) -> None:
    """Drops for one reason halt the run, and a drain that ends starts it again."""
    for reason in ("filter", "reward", "reward"):
        lease = await driver.lease()
        await driver.ledger.drop(lease.group, lease.token, reason, 12)
    await driver.ledger.drain()
    await driver.ledger.drain(False)


async def change_the_bound(driver: Driver) -> None:
    """A smaller step is pending until enough groups are trained."""
    await driver.scored(4)
    assert await driver.ledger.set_bound(groups_per_step=1, policy=Policy.DROP) is not None
    for _ in range(3):
        await driver.commit(await driver.ledger.take("e3"), "e3")
    await driver.ledger.applied("eng", "e3", 4)


async def lose_writes(driver: Driver, directory: Path) -> None:
    """The ledger loses two accepts and a commit, and is rebuilt from its archive and the journal."""
    ledger = driver.ledger
    leases = [await driver.lease() for _ in range(3)]
    await Archiver(ledger, directory).archive_all()
    archived = [json.loads(line) for line in (directory / FILE).read_bytes().splitlines()]
    for lease in leases[:2]:
        await ledger.accept(lease.group, lease.token, {4: 9})
    await driver.commit(await ledger.take("e3"), "e3")
    lost = [dict(event) for event in await ledger.events(len(archived), 1000)]
    status = await ledger.status()
    snapshot = restored(archived, journal_of(archived + lost, len(archived)), found=status.sequence)
    await ledger.rebuild(small(driver, status.bound), snapshot)


def events(archive: bytes) -> list[dict[str, Any]]:
    """The events of an archive, without what differs from run to run."""
    found = [json.loads(line) for line in archive.splitlines()]
    return [
        {name: value for name, value in event.items() if name not in ("time_ms", "chain")} for event in found
    ]


async def test_the_log_of_the_ledger_in_memory_is_the_golden_one_byte_for_byte(tmp_path: Path) -> None:
    assert await every_kind(memory_rig(), tmp_path) == (GOLDEN / "memory.jsonl").read_bytes()


async def test_the_log_of_the_ledger_on_valkey_has_the_golden_events(valkey_url: str, tmp_path: Path) -> None:
    rig = await RedisRig.start(valkey_url, **tokens())
    archive = await every_kind(rig, tmp_path)
    await rig.close()
    assert events(archive) == events((GOLDEN / "valkey.jsonl").read_bytes())


async def test_the_archive_holds_the_bytes_of_the_server(valkey_url: str, tmp_path: Path) -> None:
    rig = await RedisRig.start(valkey_url)
    driver = await Driver(rig).begin(B=1)
    await driver.step(1)
    stream = rig.server.xrange(rig.ledger.keys.of("events"))
    await Archiver(rig.ledger, tmp_path).archive_all()
    await rig.close()
    lines = (tmp_path / FILE).read_bytes().splitlines()
    assert [line[: line.rindex(b',"chain"')] + b"}" for line in lines] == [
        fields[b"e"] for _, fields in stream
    ]


@pytest.mark.parametrize("name", ["memory", "valkey"])
def test_a_golden_log_has_every_kind_of_event_and_is_proven(name: str) -> None:
    path = GOLDEN / f"{name}.jsonl"
    assert {event["event"] for event in events(path.read_bytes())} == KINDS
    result = verify(path)
    assert result.violations == []
    assert (result.issued, result.trained, result.dropped, result.steps) == (12, 7, 3, 5)


@pytest.mark.parametrize("name", ["memory", "valkey"])
def test_golden_lines_are_decoded_and_encoded_without_loss(name: str) -> None:
    for line in (GOLDEN / f"{name}.jsonl").read_bytes().splitlines():
        fields = json.loads(line)
        del fields["chain"]
        event = decode_line(line)
        assert isinstance(event, KnownEvent)
        assert decode_fields(fields) == event
        assert fields_of(event) == fields


def test_fields_of_a_newer_version_are_ignored() -> None:
    for line in (GOLDEN / "valkey.jsonl").read_bytes().splitlines():
        assert decode_line(line[:-1] + b',"new":{"a":[1]}}') == decode_line(line)
    assert decode_line(b'{"seq":7,"time_ms":1,"event":"bless","group":3}') == UnknownEvent(
        seq=7, time_ms=1, name="bless"
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"[1]", "the line is not an event"),
        (b"\xff", "the line is not an event"),
        (b"[" * 100_000, "the line is not an event"),
        (b'{"seq":3,"event":"steps","steps":2.5}', "malformed: Expected `int`, got `float` - at `$.steps`"),
        (b'{"seq":3,"event":"steps","steps":true}', "malformed: Expected `int`, got `bool` - at `$.steps`"),
        (b'{"seq":3,"event":"steps"}', "malformed: Object missing required field `steps`"),
        (
            b'{"seq":3,"event":"lost","group":1,"token":[]}',
            "malformed: Expected `str`, got `array` - at `$.token`",
        ),
    ],
)
def test_a_malformed_line_says_what_is_wrong(line: bytes, problem: str) -> None:
    event = decode_line(line)
    assert isinstance(event, MalformedEvent)
    assert event.problem == problem

"""Which calls and results of tools are journalled, and which are refused."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from protocol.codec import encode_payload
from protocol.errors import ProtocolError
from protocol.messages import Call
from protocol.tensors import Array
from services.ingest.call_admission import CallSweep, check_call
from services.ledger.interface import Lease
from tests.contracts.ledger_rig import Driver, MemoryRig
from tests.contracts.memory_ledger.ledger import MemoryLedger
from tests.protocol.samples import CALL, RESULT
from trainer.storage.call_store import CallStore
from trainer.storage.spool import Spool


@pytest.mark.parametrize("call", [CALL, RESULT], ids=["call", "result"])
def test_a_call_and_a_result_are_taken(call: Call) -> None:
    check_call(call)


IDS = Array.of([1, 2], "int32")
WRONG: dict[str, tuple[Call, dict[str, Any], str]] = {
    "no tokens": (CALL, {"tokens": Array.of([], "int32")}, "logprobs"),
    "another count": (CALL, {"logprobs": Array.of([-0.5], "float32")}, "logprobs"),
    "not finite": (CALL, {"logprobs": Array.of([-0.5, float("nan")], "float32")}, "logprobs is not finite"),
    "above 0": (
        CALL,
        {"logprobs": Array.of([-0.5, 2.64], "float32")},
        "logprobs of sample 0 has 2.64 for token 1, above 0",
    ),
    "spans": (CALL, {"spans": Array.of([[1, 3]], "int32")}, "spans do not cover 2 tokens"),
    "parent": (CALL, {"parent": 1}, "parent is 1 of call 1"),
    "result of a call": (CALL, {"result": b"1"}, "result needs both name and result"),
    "name without a result": (RESULT, {"result": b""}, "result needs both name and result"),
    "tokens of a result": (RESULT, {"tokens": IDS}, "tokens is not empty, and the call is a result"),
    "context of a result": (RESULT, {"inserted": IDS}, "inserted is not empty"),
    "number of a result": (RESULT, {"number": -1}, "number is -1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_call_that_contradicts_itself_is_refused(what: str) -> None:
    call, changes, why = WRONG[what]
    with pytest.raises(ProtocolError, match=f"group 7: {why}"):
        check_call(msgspec.structs.replace(call, **changes))


def test_a_first_call_is_journalled_though_attempts_ended_before_it() -> None:
    check_call(msgspec.structs.replace(CALL, attempt=3, number=0, parent=-1))


@pytest.mark.parametrize("field", ["number", "attempt"])
@pytest.mark.parametrize("value", [-1, 2**63])
def test_a_number_that_the_spool_cannot_hold_is_named(field: str, value: int) -> None:
    with pytest.raises(ProtocolError, match=f"group 7: {field} is {value}"):
        check_call(msgspec.structs.replace(CALL, **{field: value}))


KEPT_S = 100.0


class World:
    """A ledger with a run, a spool, and a sweep whose clock the test sets."""

    def __init__(self, spool: Spool) -> None:
        self.store, self.now_s = CallStore(spool), 0.0
        self.driver = Driver(MemoryRig())
        self.sweep = CallSweep(self.driver.ledger, self.store, KEPT_S, lambda: self.now_s)

    async def playing(self) -> Lease:
        """A group that is leased and has made a call."""
        lease = await self.driver.lease()
        self.store.hold(lease.group, lease.token)
        call = replace(CALL, group=lease.group, token=lease.token)
        assert self.store.put_many([(call, encode_payload(call))]) == [""]
        return lease


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with closing(Spool(tmp_path / "spool.sqlite")) as spool:
        yield World(spool)


async def test_calls_of_a_live_group_are_kept_however_long_it_plays(world: World) -> None:
    await world.driver.begin()
    lease = await world.playing()
    for now_s in (0.0, 2 * 86_400.0, 10**9):
        world.now_s = now_s
        assert await world.sweep.sweep() == 0
    assert world.store.groups() == [lease.group]


async def test_calls_of_a_group_that_waits_for_another_lease_are_kept(world: World) -> None:
    await world.driver.begin()
    lease = await world.playing()
    await world.driver.ledger.release(lease.group, lease.token, "drain")
    world.now_s = 10**9
    assert await world.sweep.sweep() == 0
    assert world.store.groups() == [lease.group]


async def test_calls_of_an_ended_group_are_forgotten_in_time(world: World) -> None:
    await world.driver.begin()
    kept, ended = await world.playing(), await world.playing()
    await world.driver.ledger.drop(ended.group, ended.token, "straggler")
    world.now_s = 10**6
    assert await world.sweep.sweep() == 0  # found now, so its time begins now
    world.now_s += KEPT_S - 1
    assert await world.sweep.sweep() == 0
    world.now_s += 1
    assert await world.sweep.sweep() == 1
    assert world.store.groups() == [kept.group]
    assert not world.store.is_held(ended.group, ended.token)


async def test_a_sweep_before_the_run_is_created_does_nothing(world: World) -> None:
    assert isinstance(world.driver.ledger, MemoryLedger)
    assert await world.sweep.sweep() == 0

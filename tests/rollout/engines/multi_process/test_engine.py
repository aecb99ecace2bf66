"""Tests `RequestGate`: requests wait while weights change or are released, and can be aborted meanwhile."""

import asyncio

import pytest

from protocol.errors import EngineError
from rollout.engines.base import Served
from rollout.engines.multi_process.engine import RequestGate
from rollout.engines.weight_state import WeightState


class Liveness:
    """Whether the engine lives, as the gate asks for it."""

    def __init__(self) -> None:
        self.closed = False

    async def check(self) -> None:
        if self.closed:
            raise EngineError("closed")


async def let_run() -> None:
    """Run every task until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_request_waits_for_the_end_of_a_change_and_for_weights() -> None:
    weights = WeightState()
    gate = RequestGate(weights, Liveness().check)
    assert await gate.admitted("before/0")
    weights.release()
    async with asyncio.TaskGroup() as group:
        with weights.changing():
            waiting = group.create_task(gate.admitted("r/0"))
            await let_run()
            assert not waiting.done()
        gate.notify()
        await let_run()
        assert not waiting.done()  # the change is over, but there are no weights
        with weights.changing():
            weights.serve(Served("e1", 1, 7))
        gate.notify()
    assert waiting.result()


async def test_abort_ends_the_wait_of_that_request_alone() -> None:
    weights = WeightState()
    gate = RequestGate(weights, Liveness().check)
    async with asyncio.TaskGroup() as group:
        with weights.changing():
            tasks = {name: group.create_task(gate.admitted(name)) for name in ("a/0", "b/0")}
            await let_run()
            gate.abort(["a/0", "unknown/0"])
            await let_run()
            assert tasks["a/0"].done()
            assert not tasks["b/0"].done()
        gate.notify()
    assert (tasks["a/0"].result(), tasks["b/0"].result()) == (False, True)
    assert await gate.admitted("a/0")
    assert await gate.admitted("unknown/0")


async def test_waiting_request_fails_when_the_engine_is_closed() -> None:
    weights, engine = WeightState(), Liveness()
    gate = RequestGate(weights, engine.check)
    weights.release()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(refused(gate))
        await let_run()
        engine.closed = True
        gate.notify()
    assert waiting.result() == "closed"


async def refused(gate: RequestGate) -> str:
    with pytest.raises(EngineError) as error:
        await gate.admitted("r/0")
    return str(error.value)

"""A cancelled call ends its task, whenever the cancellation comes."""

import asyncio

import pytest

from services.ledger.interface import Peer
from services.ledger.redis.ledger import RedisLedger
from tests.contracts.ledger_rig import new_run


@pytest.mark.parametrize("turns", range(12))
async def test_a_cancellation_in_a_call_is_not_lost(valkey_url: str, turns: int) -> None:
    ledger = await RedisLedger.connect(valkey_url, new_run())

    async def beat() -> None:
        await ledger.register(Peer("rollout", "x", {}), 5000)
        await asyncio.Event().wait()

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(beat())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled()
    await ledger.close()

"""Tests what a terminal reports of scores that could not be computed."""

import asyncio

from protocol.topics import Role
from services.ledger.interface import Peer
from services.ledger.memory.ledger import MemoryLedger
from services.observability.score_failures import FAILED, MOST, report_failures_loop


async def test_each_kind_of_failure_is_reported_once() -> None:
    ledger = MemoryLedger()
    texts = [f"function: /x/my_reward.py:12: KeyError: {n}" for n in range(3)]
    texts += [f"math: {'x' * n}" for n in range(MOST + 5)]
    for number, text in enumerate(texts):
        await ledger.register(
            Peer(Role.REWARD, f"reward.{number}", {"name": f"reward.{number}", FAILED: text}), ttl_ms=60_000
        )
    reported: list[str] = []
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(report_failures_loop(ledger, reported.append))
        while len(reported) < MOST:  # noqa: ASYNC110 (the loop has no event)
            await asyncio.sleep(0)
        loop.cancel()
    assert len(reported) == MOST
    assert sum("/x/my_reward.py:12: KeyError" in line for line in reported) == 1

"""The bus behind a proxy that damages frames: every message arrives once and intact, damage is counted."""

import asyncio
import random
from collections.abc import Mapping

import msgspec
import pytest

from protocol.messages import Rollout
from protocol.tensors import Array
from protocol.topics import ROLLOUTS
from services.bus.config import BusConfig
from services.bus.receiver import Receiver
from services.bus.sender import Sender
from tests.protocol.samples import ROLLOUT
from tests.trials.chaos.proxy import Proxy, Weather

MESSAGES, AT_ONCE = 160, 20
CONFIG = BusConfig(heartbeat_s=0.05, peer_timeout_s=1.0)
SPOIL = ("corrupt", "truncate")
"""Faults that change bytes, which is noticed."""


@pytest.mark.parametrize("fault", ["cut", "stall", "mute", "slow", "corrupt", "truncate"])
async def test_every_message_arrives_once_and_whole_through_a_link_that(fault: str) -> None:
    weather = Weather(random.Random(fault))
    got: list[int] = []
    async with (
        asyncio.timeout(120),
        Receiver(ROLLOUTS, run="r", incarnation="receiver", config=CONFIG) as receiver,
    ):
        proxy = Proxy(weather, ("127.0.0.1", int(receiver.endpoint.rpartition(":")[2])))
        port = await proxy.start("127.0.0.1")

        async def discover() -> Mapping[str, str]:
            return {"receiver": f"tcp://127.0.0.1:{port}"}

        async with Sender(
            ROLLOUTS, run="r", incarnation="sender", role="rollout", config=CONFIG, discover=discover
        ) as sender:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(read(receiver, got))
                for first in range(0, MESSAGES, AT_ONCE):
                    weather.begin(fault)
                    sends = [
                        tasks.create_task(sender.send(message(group), id=f"m{group}"))
                        for group in range(first, first + AT_ONCE)
                    ]
                    spoilt = weather.spoilt
                    await asyncio.wait(sends, timeout=0.2)
                    while fault in SPOIL and weather.spoilt == spoilt:  # noqa: ASYNC110 (a busy machine has passed nothing on yet)
                        await asyncio.sleep(0.01)
                    weather.end(fault)
                    await asyncio.wait(sends)
                reading.cancel()
        proxy.close()
        counted = receiver.stats.malformed + sender.stats.malformed + sender.stats.resent
    assert set(got) == set(range(MESSAGES))
    # a bit flipped in an id, which the checksum does not cover, makes another message: the ledger refuses it
    if fault != "corrupt":
        assert len(got) == MESSAGES
    if fault in SPOIL:
        assert counted


def message(group: int) -> Rollout:
    """Return a message that differs from all others."""
    return msgspec.structs.replace(ROLLOUT, group=group, tokens=Array.of([group] * 3, "int32"))


async def read(receiver: Receiver, got: list[int]) -> None:
    """Note each message that is intact, and acknowledge it."""
    while True:
        delivery = await receiver.receive()
        assert isinstance(delivery.message, Rollout)
        assert delivery.message == message(delivery.message.group)
        got.append(delivery.message.group)
        receiver.ack(delivery)

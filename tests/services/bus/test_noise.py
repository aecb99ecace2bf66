"""Frames that are not ours: they are counted, dropped, and disturb no traffic."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.messages import Ack, Hello
from tests.services.bus.harness import (
    DEADLINE_S,
    QUICK,
    Raw,
    Registry,
    acknowledge,
    background,
    eventually,
    frame,
    receiver,
    score,
    sender,
)


def damaged(position: int) -> bytes:
    whole = bytearray(frame(score(3, "x" * 100), "m3"))
    whole[-1 - position % 50] ^= 0x5A
    return bytes(whole)


NOISE = st.lists(
    st.one_of(
        st.binary(max_size=300).map(lambda data: [data]),
        st.lists(st.binary(max_size=20), min_size=2, max_size=4),
        st.integers(0, 49).map(lambda position: [damaged(position)]),
        st.integers(0, 100).map(lambda cut: [frame(score(3), "m3")[:cut]]),
        st.just([frame(score(3), "m3", run="another")]),
        st.just([frame(score(3), "")]),
        st.just([frame(Ack(messages=("m1",)), "")]),
    ),
    max_size=40,
)


@settings(max_examples=25, deadline=None)
@given(noise=NOISE, known=st.booleans())
def test_noise_hurts_no_traffic(noise: list[list[bytes]], known: bool) -> None:
    async def main() -> None:
        groups: list[int] = []
        async with (
            receiver() as inbox,
            sender(Registry({"ingest.1": inbox.endpoint})) as outbox,
            Raw(inbox.endpoint) as raw,
        ):
            if known:
                await raw.hello()

            async def disturb() -> None:
                for frames in noise:
                    await raw.say(*frames)

            async with background(acknowledge(inbox, groups), disturb()), asyncio.TaskGroup() as group:
                for index in range(50):
                    group.create_task(outbox.send(score(index)))
                await eventually(lambda: inbox.stats.malformed + inbox.stats.unknown_peer >= len(noise))
            assert sorted(groups) == list(range(50))
            assert inbox.stats.malformed + inbox.stats.unknown_peer == len(noise)
            assert (outbox.stats.acked, outbox.stats.malformed) == (50, 0)

    asyncio.run(main())


@settings(max_examples=25, deadline=None)
@given(noise=NOISE)
def test_noise_from_a_receiver_hurts_no_sender(noise: list[list[bytes]]) -> None:
    async def main() -> None:
        groups: list[int] = []
        async with receiver() as inbox, Raw() as raw:
            registry = Registry({"raw.1": raw.endpoint, "ingest.1": inbox.endpoint})
            async with (
                sender(registry) as outbox,
                background(acknowledge(inbox, groups)),
                asyncio.TaskGroup() as group,
            ):
                [peer], _ = await raw.hear_from()
                for frames in noise:
                    await raw.say(peer, *frames)
                for index in range(20):
                    group.create_task(outbox.send(score(index)))
        assert sorted(groups) == list(range(20))

    asyncio.run(main())


async def test_peer_that_said_no_hello_is_unknown() -> None:
    async with receiver() as inbox, Raw(inbox.endpoint) as raw:
        await raw.say(frame(score(1), "m1"))
        await eventually(lambda: inbox.stats.unknown_peer == 1)
        await raw.say(frame(Hello(sender="s", role="reward"), run="another"))
        await raw.say(frame(score(1), "m1"))
        await eventually(lambda: inbox.stats.unknown_peer == 2)
        assert (inbox.stats.malformed, inbox.stats.received) == (1, 0)


@pytest.mark.parametrize("hello", [{"sent": 2**64 - 1}, {"sent": -1}, {"sender": "x" * 10**6}])
async def test_hello_that_no_peer_says_is_malformed_and_stops_no_acknowledgement(
    hello: dict[str, Any],
) -> None:
    groups: list[int] = []
    async with receiver() as inbox, Raw(inbox.endpoint) as raw:
        await raw.say(frame(msgspec.structs.replace(Hello(sender="raw.1", role="reward"), **hello)))
        await eventually(lambda: inbox.stats.malformed == 1)
        assert inbox.snapshot()["senders"] == {}
        async with (
            sender(Registry({"ingest.1": inbox.endpoint})) as outbox,
            background(acknowledge(inbox, groups)),
            asyncio.TaskGroup() as group,
        ):
            for index in range(20):
                group.create_task(outbox.send(score(index)))
    assert sorted(groups) == list(range(20))


async def test_damaged_message_makes_the_sender_send_again() -> None:
    """A relay damages the first message: its checksum is wrong, and a heartbeat shows it is not held."""
    groups: list[int] = []
    async with receiver() as inbox, Raw() as front, Raw(inbox.endpoint) as back:
        broken = 0

        async def forward() -> None:
            nonlocal broken
            while True:
                peer, data = await front.socket.recv_multipart()
                address[:] = [peer]
                if b"boom" in data and not broken:
                    broken += 1
                    data = data.replace(b"boom", b"bang")
                await back.say(data)

        async def backward() -> None:
            while True:
                [data] = await back.socket.recv_multipart()
                await front.say(*address, data)

        address: list[bytes] = []
        async with sender(Registry({"ingest.1": front.endpoint})) as outbox:
            async with background(forward(), backward(), acknowledge(inbox, groups)):
                await outbox.send(score(1))
            assert (groups, broken, inbox.stats.malformed) == ([1], 1, 1)
            assert outbox.stats.resent >= 1


async def _oversize(endpoint: str) -> None:
    async with Raw(endpoint) as raw:
        await raw.hello()
        await raw.say(b"x" * 100_000)


async def test_connections_that_speak_no_zeromq_are_counted() -> None:
    async with receiver() as inbox:
        await asyncio.to_thread(_say, inbox.endpoint, b"GET / HTTP/1.1\r\n\r\n" * 20)
        await eventually(lambda: inbox.stats.unknown_peer == 1)


async def _not_zeromq(endpoint: str) -> None:
    _say(endpoint, b"GET / HTTP/1.1\r\n\r\n" * 100)


def _say(endpoint: str, data: bytes) -> None:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(data)


@pytest.mark.parametrize("attack", [_oversize, _not_zeromq])
async def test_frames_that_zeromq_itself_refuses_hurt_no_traffic(
    attack: Callable[[str], Awaitable[None]],
) -> None:
    groups: list[int] = []
    async with receiver(config=replace(QUICK, max_frame_bytes=10_000)) as inbox:
        async with (
            sender(Registry({"ingest.1": inbox.endpoint})) as outbox,
            background(acknowledge(inbox, groups)),
        ):
            await outbox.send(score(1))
            await attack(inbox.endpoint)
            async with asyncio.timeout(DEADLINE_S):
                await outbox.send(score(2))
    assert groups == [1, 2]
    assert inbox.stats.bytes_in < 10_000

"""Resending: when a message is sent again, and when it is not."""

import asyncio
import signal
from dataclasses import replace

import pytest

from protocol.messages import Ack, Heartbeat, Hello
from services.bus.sender import Sender
from tests.services.bus.harness import (
    DEADLINE_S,
    QUICK,
    Raw,
    Registry,
    acknowledge,
    background,
    eventually,
    frame,
    holder,
    receiver,
    score,
    sender,
)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_dead_receiver_s_messages_go_to_another(how: signal.Signals) -> None:
    groups: list[int] = []
    registry = Registry()
    config = replace(
        QUICK, peer_timeout_s=4.0 if how is signal.SIGSTOP else 20.0
    )  # a busy machine is silent for a second
    outbox = sender(registry, config=config)
    async with holder("ingest.1") as (process, endpoint, output), receiver("ingest.2") as second, outbox:
        registry["ingest.1"] = endpoint
        async with background(acknowledge(second, groups)), asyncio.TaskGroup() as group:
            for index in range(20):
                group.create_task(outbox.send(score(index)))
            for _ in range(20):
                await output.readline()
            registry["ingest.2"] = second.endpoint
            await eventually(lambda: _ready(outbox) == {"ingest.1", "ingest.2"})
            assert (outbox.outstanding, groups) == (20, [])
            process.send_signal(how)
        assert sorted(groups) == list(range(20))
        assert outbox.stats.resent >= 20


async def test_nothing_is_lost_when_receivers_are_killed_under_load() -> None:
    groups: set[int] = set()
    registry = Registry()

    async def send(index: int) -> None:
        await outbox.send(score(index))

    async with receiver("ingest.0") as survivor, sender(registry) as outbox, asyncio.TaskGroup() as group:
        for life in (1, 2):
            async with holder(f"ingest.{life}") as (process, endpoint, output):
                registry[f"ingest.{life}"] = endpoint
                for index in range(200):
                    group.create_task(send(life * 1000 + index))
                for _ in range(50 * life):
                    await output.readline()
                process.kill()
                await process.wait()
                del registry[f"ingest.{life}"]
        registry["ingest.0"] = survivor.endpoint
        seen: list[int] = []
        async with background(acknowledge(survivor, seen)):
            await eventually(lambda: outbox.outstanding == 0)
        groups.update(seen)
    assert groups == {life * 1000 + index for life in (1, 2) for index in range(200)}
    assert len(seen) == len(groups)


async def test_receiver_that_leaves_the_registry_loses_its_messages_to_another() -> None:
    groups: list[int] = []
    async with receiver("ingest.1") as first, receiver("ingest.2") as second:
        registry = Registry({"ingest.1": first.endpoint})
        async with (
            sender(registry) as outbox,
            background(acknowledge(second, groups)),
            asyncio.TaskGroup() as group,
        ):
            group.create_task(outbox.send(score(1)))
            await first.receive()
            registry["ingest.2"] = second.endpoint
            del registry["ingest.1"]
        assert groups == [1]
        assert outbox.stats.resent == 1


async def test_restarted_receiver_gets_what_its_predecessor_held() -> None:
    groups: list[int] = []
    registry = Registry()
    async with sender(registry) as outbox, asyncio.TaskGroup() as group:
        async with receiver("ingest.1") as first:
            registry["ingest.1"] = first.endpoint
            for index in range(10):
                group.create_task(outbox.send(score(index)))
            for _ in range(10):
                held = await first.receive()
            first.ack(held)
            await eventually(lambda: outbox.outstanding == 9)
        async with receiver("ingest.2") as second:
            registry.clear()
            registry["ingest.2"] = second.endpoint
            async with background(acknowledge(second, groups)):
                await eventually(lambda: outbox.outstanding == 0)
    assert len(groups) == 9
    assert outbox.stats.resent == 9


async def test_message_that_the_receiver_has_seen_and_does_not_hold_is_sent_again() -> None:
    async with (
        Raw() as raw,
        sender(Registry({"raw.1": raw.endpoint})) as outbox,
        asyncio.TaskGroup() as group,
    ):
        peer = await _greet(raw)
        sending = group.create_task(outbox.send(score(1), id="m1"))
        assert await raw.hear_news_from() == score(1)
        await raw.say(peer, frame(Heartbeat(receiver="raw.1", sequence=2, seen=1)))
        assert await raw.hear_news_from() == score(1)
        assert not sending.done()
        assert outbox.stats.resent == 1
        await raw.say(peer, frame(Ack(messages=("m1",))))


async def test_message_that_was_lost_is_sent_again_even_if_none_follows_it() -> None:
    """The hello counts what was sent; the receiver counts that as seen, and names what it holds."""
    async with (
        Raw() as raw,
        sender(Registry({"raw.1": raw.endpoint})) as outbox,
        asyncio.TaskGroup() as group,
    ):
        peer = await _greet(raw)
        group.create_task(outbox.send(score(1), id="m1"))
        assert await raw.hear_news_from() == score(1)
        assert (await raw.hear_from())[1] == Hello(sender="reward.1", role="reward", sent=1)
        await raw.say(peer, frame(Ack(messages=("m1",))))
    async with receiver() as inbox, Raw(inbox.endpoint) as raw, asyncio.timeout(DEADLINE_S):
        await raw.hello()
        await raw.say(frame(Hello(sender="raw.1", role="reward", sent=1)))
        beat = await raw.hear_of(Heartbeat)
        while isinstance(beat, Heartbeat) and beat.seen < 1:
            beat = await raw.hear_of(Heartbeat)
        assert beat == Heartbeat(receiver="ingest.1", sequence=beat.sequence, seen=1)  # type: ignore[union-attr]


async def test_message_that_is_held_or_unseen_or_in_an_outdated_heartbeat_is_not_sent_again() -> None:
    async with (
        Raw() as raw,
        sender(Registry({"raw.1": raw.endpoint})) as outbox,
        asyncio.TaskGroup() as group,
    ):
        peer = await _greet(raw)
        group.create_task(outbox.send(score(1), id="m1"))
        await raw.hear_from()
        for sequence in range(2, 30):
            await raw.say(peer, frame(Heartbeat(receiver="raw.1", sequence=sequence, seen=0)))
            await raw.say(peer, frame(Heartbeat(receiver="raw.1", sequence=sequence, seen=1, held=("m1",))))
        await raw.say(peer, frame(Heartbeat(receiver="raw.1", sequence=1, seen=1)))
        await raw.say(peer, frame(Ack(messages=("m1",))))
        await eventually(lambda: outbox.outstanding == 0)
        assert outbox.stats.resent == 0


async def test_receiver_under_another_s_address_is_not_used() -> None:
    groups: list[int] = []
    registry = Registry()
    async with receiver("ingest.2") as other, receiver("ingest.3") as right, sender(registry) as outbox:
        registry["ingest.1"] = other.endpoint
        async with (
            background(acknowledge(other, groups), acknowledge(right, groups)),
            asyncio.TaskGroup() as group,
        ):
            group.create_task(outbox.send(score(1)))
            await eventually(lambda: other.snapshot()["senders"] != {})
            assert groups == []
            registry["ingest.3"] = right.endpoint
        assert (other.stats.received, right.stats.received) == (0, 1)


async def test_acknowledgement_of_a_message_that_was_sent_elsewhere_since_counts() -> None:
    async with Raw() as slow, Raw() as fast:
        registry = Registry({"slow.1": slow.endpoint})
        async with sender(registry) as outbox, asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            peer = await _greet(slow, "slow.1")
            for index in (1, 2):
                group.create_task(outbox.send(score(index), id=f"m{index}"))
                await slow.hear_from()
            registry["fast.1"] = fast.endpoint
            await _greet(fast, "fast.1")
            await eventually(lambda: _ready(outbox) == {"slow.1", "fast.1"})
            await slow.say(peer, frame(Heartbeat(receiver="slow.1", sequence=2, seen=2, held=("m2",))))
            assert await fast.hear_news_from() == score(1)
            await slow.say(peer, frame(Ack(messages=("m1", "m2"))))
        assert (outbox.stats.acked, outbox.stats.resent) == (2, 1)


async def test_messages_spread_over_the_receivers() -> None:
    async with receiver("ingest.1") as first, receiver("ingest.2") as second:
        registry = Registry({"ingest.1": first.endpoint, "ingest.2": second.endpoint})
        async with sender(registry) as outbox, asyncio.TaskGroup() as group:
            await eventually(lambda: len(_ready(outbox)) == 2)
            for index in range(40):
                group.create_task(outbox.send(score(index)))
            await eventually(lambda: first.stats.received + second.stats.received == 40)
            assert first.stats.received == second.stats.received == 20
            async with background(acknowledge(first, []), acknowledge(second, [])):
                await eventually(lambda: outbox.outstanding == 0)


async def test_registry_that_fails_leaves_the_links_as_they_are() -> None:
    groups: list[int] = []
    calls = 0
    async with receiver() as inbox:

        async def flaky() -> dict[str, str]:
            nonlocal calls
            calls += 1
            if calls % 2 == 0:
                raise ConnectionError("registry is down")
            return {"ingest.1": inbox.endpoint}

        async with sender(flaky) as outbox, background(acknowledge(inbox, groups)):
            for index in range(3):
                seen = calls
                await eventually(lambda seen=seen: calls >= seen + 2)  # type: ignore[misc]
                await outbox.send(score(index))
            assert (groups, outbox.stats.resent) == ([0, 1, 2], 0)


async def test_bug_in_discover_ends_the_block() -> None:
    async def broken() -> dict[str, str]:
        raise KeyError("bug")

    with pytest.raises(ExceptionGroup) as caught:
        async with sender(broken) as outbox:
            await outbox.send(score(1))
    assert caught.group_contains(KeyError)


async def _greet(raw: Raw, name: str = "raw.1") -> bytes:
    """Answer the sender's hello as a receiver does; returns its address."""
    [peer], hello = await raw.hear_from()
    assert isinstance(hello, Hello)
    await raw.say(peer, frame(Heartbeat(receiver=name, sequence=1)))
    return peer


def _ready(outbox: Sender) -> set[str]:
    receivers = outbox.snapshot()["receivers"]
    assert isinstance(receivers, dict)
    return {name for name, state in receivers.items() if state["ready"]}

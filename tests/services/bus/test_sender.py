"""`Sender.send`: every wait ends, slots are given in order, one message per id, immediate refusals."""

import asyncio
from dataclasses import replace

import pytest

from protocol.codec import encode, encode_payload, wrap
from protocol.errors import FrameTooLarge, Reason, Refused, Unavailable
from protocol.messages import Heartbeat
from protocol.topics import WEIGHTS
from tests.services.bus.harness import (
    DEADLINE_S,
    QUICK,
    RUN,
    Registry,
    acknowledge,
    background,
    eventually,
    outcome,
    receiver,
    score,
    sender,
)


async def test_send_cancelled_without_receiver_forgets_the_message() -> None:
    registry = Registry()
    groups: list[int] = []
    async with receiver() as inbox, sender(registry) as outbox:
        async with asyncio.TaskGroup() as group:
            lost = group.create_task(outbox.send(score(1)))
            await eventually(lambda: outbox.outstanding == 1)
            lost.cancel()
        assert outbox.outstanding == 0
        registry["ingest.1"] = inbox.endpoint
        async with background(acknowledge(inbox, groups)):
            await outbox.send(score(2))
        assert groups == [2]


async def test_send_waits_for_a_slot_and_a_cancelled_one_wakes_the_next() -> None:
    config = replace(QUICK, max_outstanding=1)
    registry = Registry()
    groups: list[int] = []
    async with receiver() as inbox, sender(registry, config=config) as outbox, asyncio.timeout(DEADLINE_S):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(outbox.send(score(index))) for index in range(4)]
            await eventually(lambda: outbox.outstanding == 1)
            tasks[0].cancel()
            tasks[1].cancel()
            registry["ingest.1"] = inbox.endpoint
            async with background(acknowledge(inbox, groups)):
                await eventually(lambda: all(task.done() for task in tasks))
        assert sorted(groups) == [2, 3]


async def test_same_id_twice_is_refused_and_changes_nothing() -> None:
    async with sender(Registry()) as outbox, asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        first = group.create_task(outbox.send(score(1), id="m1"))
        await eventually(lambda: outbox.outstanding == 1)
        with pytest.raises(Refused) as caught:
            await outbox.send(score(1), id="m1")
        assert caught.value.reason is Reason.DUPLICATE
        assert outbox.outstanding == 1
        first.cancel()


async def test_slot_that_a_refused_message_waited_for_goes_to_the_next() -> None:
    config = replace(QUICK, max_outstanding=2)
    async with (
        receiver() as inbox,
        sender(Registry({"ingest.1": inbox.endpoint}), config=config) as outbox,
        asyncio.timeout(DEADLINE_S),
    ):
        async with asyncio.TaskGroup() as group:
            for id in ("m1", "m2"):
                group.create_task(outbox.send(score(1), id=id))
            held = [await inbox.receive() for _ in range(2)]
            group.create_task(outbox.send(score(1), id="m3"))
            twice = group.create_task(outcome(outbox.send(score(1), id="m3")))
            group.create_task(outbox.send(score(1), id="m4"))
            await asyncio.sleep(0)  # all three wait in line
            for delivery in held:
                inbox.ack(delivery)
            held = [await inbox.receive() for _ in range(2)]
            assert {delivery.envelope.id for delivery in held} == {"m3", "m4"}
            assert isinstance(twice.result(), Refused)
            for delivery in held:
                inbox.ack(delivery)


async def test_closing_the_sender_ends_what_waits() -> None:
    async with asyncio.TaskGroup() as group:
        async with sender(Registry(), config=replace(QUICK, max_outstanding=1)) as outbox:
            tasks = [group.create_task(outcome(outbox.send(score(index)))) for index in range(2)]
            await eventually(lambda: outbox.outstanding == 1)
    assert all(isinstance(task.result(), Unavailable) for task in tasks)
    with pytest.raises(Unavailable):
        await outbox.send(score(3))


async def test_closing_the_receiver_ends_receive() -> None:
    async with asyncio.TaskGroup() as group:
        async with receiver() as inbox:
            reading = group.create_task(outcome(inbox.receive()))
            await asyncio.sleep(0)
    assert isinstance(reading.result(), Unavailable)


def test_wrapped_payload_is_the_frame_that_encode_makes() -> None:
    names = {"run": RUN, "id": "m1", "epoch": "e", "group": 5, "token": "t"}
    assert wrap(encode_payload(score(5)), **names) == encode(score(5), **names)  # type: ignore[arg-type]


async def test_unsendable_message_is_refused_at_once() -> None:
    async with sender(Registry(), config=replace(QUICK, max_frame_bytes=1000)) as outbox:
        with pytest.raises(FrameTooLarge):
            await outbox.send(score(1, "x" * 2000))
        with pytest.raises(TypeError, match="does not carry"):
            await outbox.send(Heartbeat(receiver="r", sequence=0))
        assert outbox.outstanding == 0


def test_topic_of_the_other_pattern_is_refused() -> None:
    with pytest.raises(TypeError):
        receiver(topic=WEIGHTS)
    with pytest.raises(TypeError):
        sender(Registry(), topic=WEIGHTS)

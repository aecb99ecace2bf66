"""Delivery: a message reaches one receiver, is acknowledged or refused, and nothing is lost or done twice."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import uvloop

from protocol.codec import MAX_FRAME_BYTES
from protocol.messages import Ack, Heartbeat, Rollout
from protocol.topics import SCORED
from services.bus.peers import ANSWER_BYTES
from services.bus.receiver import Delivery, Receiver
from services.bus.sender import Declined
from tests.services.bus.harness import (
    DEADLINE_S,
    QUICK,
    Raw,
    Registry,
    acknowledge,
    background,
    eventually,
    frame,
    outcome,
    receiver,
    score,
    sender,
)

Runner = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run_loop(request: pytest.FixtureRequest) -> Runner:
    return asyncio.run if request.param == "asyncio" else uvloop.run


def test_send_returns_when_acknowledged(run_loop: Runner) -> None:
    async def main() -> None:
        async with (
            receiver() as inbox,
            sender(Registry({"ingest.1": inbox.endpoint})) as outbox,
            asyncio.timeout(DEADLINE_S),
        ):
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(outbox.send(score(7), id="m1", epoch="e", group=7, token="t"))
                delivery = await inbox.receive()
                assert not sending.done()
                assert outbox.outstanding == 1
                assert delivery.message == score(7)
                assert (delivery.envelope.id, delivery.envelope.epoch, delivery.envelope.group) == (
                    "m1",
                    "e",
                    7,
                )
                inbox.ack(delivery)
                inbox.ack(delivery)
            assert outbox.outstanding == 0
            assert outbox.stats.acked == inbox.stats.acked == 1
            assert outbox.stats.bytes_out > 0

    run_loop(main())


def test_send_returns_the_answer_and_a_repeat_is_answered_again(run_loop: Runner) -> None:
    async def main() -> None:
        async with (
            receiver() as inbox,
            sender(Registry({"ingest.1": inbox.endpoint})) as outbox,
            asyncio.timeout(DEADLINE_S),
        ):
            for answer in (b"first", b"second"):
                async with asyncio.TaskGroup() as group:
                    sending = group.create_task(outbox.send(score(7), id="m1"))
                    inbox.answer(await inbox.receive(), answer)
                assert sending.result() == answer
            assert outbox.outstanding == 0
            assert outbox.stats.acked == inbox.stats.acked == 2

    run_loop(main())


@pytest.mark.parametrize(("limit", "size"), [(100_000, 30_000), (MAX_FRAME_BYTES, ANSWER_BYTES + 1)])
async def test_answers_come_in_frames_that_the_sender_takes(limit: int, size: int) -> None:
    small = replace(QUICK, max_frame_bytes=limit)
    async with (
        receiver(config=small) as inbox,
        sender(Registry({"ingest.1": inbox.endpoint}), config=small) as outbox,
        asyncio.timeout(DEADLINE_S),
        asyncio.TaskGroup() as group,
    ):
        asked = [group.create_task(outbox.send(score(index))) for index in range(5)]
        for delivery in [await inbox.receive() for _ in asked]:
            inbox.answer(delivery, bytes(size))
        assert [await asking for asking in asked] == [bytes(size)] * 5
        assert outbox.stats.resent == 0


async def test_answer_that_fits_no_frame_refuses_its_message() -> None:
    small = replace(QUICK, max_frame_bytes=100_000)
    async with (
        receiver(config=small) as inbox,
        sender(Registry({"ingest.1": inbox.endpoint}), config=small) as outbox,
        background(answer_each(inbox, bytes(110_000))),
    ):
        with pytest.raises(Declined, match=r"answer of 110000 bytes is over half of bus.max_frame_bytes"):
            await outbox.send(score(7))
        assert outbox.stats.resent == 0


async def answer_each(inbox: Receiver, answer: bytes) -> None:
    while True:
        inbox.answer(await inbox.receive(), answer)


def test_cancelled_receive_loses_nothing_under_load(run_loop: Runner) -> None:
    total = 3000

    async def main() -> None:
        groups: list[int] = []
        order = random.Random(0)
        async with receiver() as inbox, sender(Registry({"ingest.1": inbox.endpoint})) as outbox:

            async def restless() -> None:
                while True:
                    async with asyncio.TaskGroup() as group:
                        readers = [group.create_task(acknowledge(inbox, groups)) for _ in range(2)]
                        for _ in range(order.randrange(6)):
                            await asyncio.sleep(0)
                        for reader in readers:
                            reader.cancel()

            async with background(restless()), asyncio.TaskGroup() as group:
                for index in range(total):
                    group.create_task(outbox.send(score(index)))
            assert outbox.stats.resent == 0
        assert sorted(groups) == list(range(total))

    run_loop(main())


async def test_refused_message_raises_declined() -> None:
    async with (
        receiver() as inbox,
        sender(Registry({"ingest.1": inbox.endpoint})) as outbox,
        asyncio.timeout(DEADLINE_S),
    ):
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(outcome(outbox.send(score(1))))
            inbox.refuse(await inbox.receive(), "not_held: group 1")
        error = sending.result()
        assert isinstance(error, Declined)
        assert error.why == "not_held: group 1"
        assert outbox.stats.refused == inbox.stats.refused == 1


async def test_acknowledgements_in_any_order() -> None:
    order = random.Random(1)
    async with receiver() as inbox, sender(Registry({"ingest.1": inbox.endpoint})) as outbox:

        async def shuffle() -> None:
            left = 300
            while left:
                batch: list[Delivery] = [await inbox.receive() for _ in range(min(left, 30))]
                order.shuffle(batch)
                for delivery in batch:
                    inbox.ack(delivery)
                left -= len(batch)

        async with background(shuffle()), asyncio.TaskGroup() as group:
            for index in range(300):
                group.create_task(outbox.send(score(index)))
        assert (outbox.stats.acked, outbox.stats.resent, inbox.stats.duplicates) == (300, 0, 0)


async def test_duplicates_are_delivered_once_and_acknowledged_each_time() -> None:
    async with receiver() as inbox, Raw(inbox.endpoint) as raw, asyncio.timeout(DEADLINE_S):
        await raw.hello()
        for _ in range(3):
            await raw.say(frame(score(1), "m1"))
        delivery = await inbox.receive()
        await eventually(lambda: inbox.stats.duplicates == 2)
        inbox.ack(delivery)
        assert await raw.hear_of(Ack) == Ack(messages=("m1",))
        await raw.say(frame(score(1), "m1"))
        assert await raw.hear_of(Ack) == Ack(messages=("m1",))
        assert (inbox.stats.received, inbox.stats.duplicates) == (1, 3)


async def test_refusal_is_repeated_for_a_duplicate() -> None:
    async with receiver() as inbox, Raw(inbox.endpoint) as raw, asyncio.timeout(DEADLINE_S):
        await raw.hello()
        await raw.say(frame(score(1), "m1"))
        inbox.refuse(await inbox.receive(), "no")
        for _ in range(2):
            assert await raw.hear_of(Ack) == Ack(messages=(), refused={"m1": "no"})
            await raw.say(frame(score(1), "m1"))


async def test_acknowledgement_goes_to_the_connection_that_sent_last() -> None:
    async with (
        receiver() as inbox,
        Raw(inbox.endpoint) as first,
        Raw(inbox.endpoint) as second,
        asyncio.timeout(DEADLINE_S),
    ):
        await first.hello("reward.1")
        await second.hello("reward.1")
        await first.say(frame(score(1), "m1"))
        delivery = await inbox.receive()
        await second.say(frame(score(1), "m1"))
        await eventually(lambda: inbox.stats.duplicates == 1)
        inbox.ack(delivery)
        assert await second.hear_of(Ack) == Ack(messages=("m1",))


async def test_heartbeat_names_what_is_held() -> None:
    async with receiver() as inbox, Raw(inbox.endpoint) as raw, asyncio.timeout(DEADLINE_S):
        greeting = await raw.hello()
        assert isinstance(greeting, Heartbeat)
        assert (greeting.receiver, greeting.held, greeting.seen, greeting.credit) == ("ingest.1", (), 0, -1)
        await raw.say(frame(score(1), "m1"))
        delivery = await inbox.receive()
        while (beat := await raw.hear_of(Heartbeat)) and isinstance(beat, Heartbeat) and not beat.seen:
            pass
        assert isinstance(beat, Heartbeat)
        assert beat.held == ("m1",)
        inbox.ack(delivery)
        assert isinstance(await raw.hear_of(Ack), Ack)
        beat = await raw.hear_of(Heartbeat)
        assert isinstance(beat, Heartbeat)
        assert (beat.held, beat.seen) == ((), 1)


async def test_message_of_another_topic_is_refused_for_good() -> None:
    async with receiver(topic=replace(SCORED, carries=(Rollout,))) as inbox:
        async with sender(Registry({"ingest.1": inbox.endpoint})) as outbox, asyncio.timeout(DEADLINE_S):
            with pytest.raises(Declined, match="does not carry ScoreFailure"):
                await outbox.send(score(1))
        assert inbox.stats.received == 0


async def test_full_inbox_stops_reading_and_loses_nothing() -> None:
    config = replace(QUICK, high_water_mark=8)
    groups: list[int] = []
    async with (
        receiver(config=config) as inbox,
        sender(Registry({"ingest.1": inbox.endpoint}), config=config) as outbox,
    ):
        async with background(), asyncio.TaskGroup() as group:
            for index in range(500):
                group.create_task(outbox.send(score(index)))
            await eventually(lambda: inbox.snapshot()["waiting"] == 8)
            reader = group.create_task(acknowledge(inbox, groups))
            await eventually(lambda: len(groups) == 500)
            reader.cancel()
    assert sorted(groups) == list(range(500))

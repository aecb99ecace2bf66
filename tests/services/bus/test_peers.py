"""Credit: a receiver's window is never exceeded, and every sender gets a share."""

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.messages import Ack, Heartbeat
from services.bus.peers import Account, top_up
from services.bus.receiver import Delivery
from services.bus.sender import Sender
from tests.services.bus.harness import (
    DEADLINE_S,
    Raw,
    Registry,
    acknowledge,
    background,
    eventually,
    frame,
    receiver,
    score,
    sender,
    windowed,
)

STEPS = st.lists(
    st.tuples(st.sampled_from(["join", "send", "finish", "leave"]), st.integers(0, 9)), max_size=200
)

EACH = 12
"""Messages that each sender sends over sockets."""


@given(window=st.integers(1, 20), steps=STEPS)
def test_promises_stay_within_the_window_plus_one_per_sender(
    window: int, steps: list[tuple[str, int]]
) -> None:
    accounts: list[Account] = []
    orphans = 0
    most = 0
    for step, index in steps:
        account = accounts[index % len(accounts)] if accounts else Account()
        match step:
            case "join" if len(accounts) < 10:
                accounts.append(Account())
            case "send" if account.unused:
                account.seen += 1
                account.unfinished += 1
            case "finish" if account.unfinished:
                account.unfinished -= 1
            case "leave" if accounts:
                accounts.remove(account)
                orphans += account.unfinished
        top_up(window, accounts, orphans)
        most = max(most, len(accounts))
        assert all(account.promised >= 1 for account in accounts)
        assert sum(account.promised for account in accounts) + orphans <= window + most + orphans
        assert sum(account.unfinished for account in accounts) <= window + most


@given(window=st.integers(1, 20), others=st.integers(0, 5))
def test_busy_sender_gets_what_idle_ones_do_not_use(window: int, others: int) -> None:
    busy, idle = Account(), [Account() for _ in range(others)]
    accounts = [*idle, busy]
    top_up(window, accounts)
    while busy.unused:
        busy.seen += 1
        busy.unfinished += 1
        top_up(window, accounts)
    assert sum(account.promised for account in accounts) >= window
    assert busy.unfinished >= max(1, window - sum(account.promised for account in idle))


def test_sender_that_overdraws_gains_nothing() -> None:
    rude, polite = Account(), Account()
    top_up(4, [rude, polite])
    rude.seen += 100
    top_up(4, [rude, polite])
    assert rude.unused <= 2
    assert polite.unused >= 1


@settings(max_examples=8, deadline=None)
@given(window=st.integers(1, 6), senders=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_window_holds_over_sockets(window: int, senders: int, seed: int) -> None:
    topic = windowed(window)
    finish = random.Random(seed)  # of its own: what is drawn depends on which message comes first

    async def main() -> None:
        async with receiver(topic=topic) as inbox, asyncio.timeout(DEADLINE_S):
            registry = Registry({"ingest.1": inbox.endpoint})

            async def produce(name: str) -> None:
                async with sender(registry, name, topic=topic) as outbox, asyncio.TaskGroup() as group:
                    for index in range(EACH):
                        group.create_task(outbox.send(score(index)))

            async def consume() -> None:
                held: list[Delivery] = []
                received = Counter[bytes]()
                while received.total() < EACH * senders:
                    held.append(await inbox.receive())
                    received[held[-1].peer] += 1
                    state = inbox.snapshot()
                    assert isinstance(state["held"], int)
                    assert state["held"] <= window + senders
                    # A sender of which nothing is held has credit; where something is held of every sender
                    # that has more to send, none need have any.
                    unread = senders - sum(count == EACH for count in received.values())
                    if finish.random() < 0.5 or len(held) >= min(window, unread):
                        finish.shuffle(held)
                        while held:
                            inbox.ack(held.pop())

            async with asyncio.TaskGroup() as group:
                group.create_task(consume())
                for number in range(senders):
                    group.create_task(produce(f"reward.{number}"))
            assert inbox.stats.dropped_full == 0

    asyncio.run(main())


async def test_message_beyond_the_credit_is_dropped_and_counted() -> None:
    async with receiver(topic=windowed(2)) as inbox, Raw(inbox.endpoint) as raw, asyncio.timeout(DEADLINE_S):
        greeting = await raw.hello()
        assert isinstance(greeting, Ack | Heartbeat)
        assert greeting.credit >= 1
        for index in range(10):
            await raw.say(frame(score(index), f"m{index}"))
        await eventually(lambda: inbox.stats.received + inbox.stats.dropped_full == 10)
        assert inbox.stats.received <= 3
        assert inbox.snapshot()["held"] == inbox.stats.received


async def test_sender_waits_for_credit() -> None:
    topic = windowed(2)
    async with (
        receiver(topic=topic) as inbox,
        sender(Registry({"ingest.1": inbox.endpoint}), topic=topic) as outbox,
    ):
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            for index in range(5):
                group.create_task(outbox.send(score(index)))
            held = [await inbox.receive() for _ in range(2)]
            await eventually(lambda: outbox.snapshot()["waiting"] == 3)
            assert inbox.stats.received == 2
            for _ in range(3):
                inbox.ack(held.pop())
                held.append(await inbox.receive())
            for delivery in held:
                inbox.ack(delivery)
        assert outbox.stats.resent == 0


async def test_senders_share_idle_receivers_evenly() -> None:
    """Each sender has equal credit at each receiver; they must not all choose the same one."""
    taken: dict[str, list[int]] = {f"reward.{index}": [] for index in range(4)}
    async with AsyncExitStack() as stack:
        inboxes = {name: await stack.enter_async_context(receiver(name)) for name in taken}
        registry = Registry({name: inbox.endpoint for name, inbox in inboxes.items()})
        outboxes = [
            await stack.enter_async_context(sender(registry, f"rollout.{index}")) for index in range(40)
        ]
        async with background(*(acknowledge(inboxes[name], groups) for name, groups in taken.items())):
            await eventually(lambda: all(knows(outbox, len(taken)) for outbox in outboxes))
            for outbox in outboxes:
                await outbox.send(score(1))
    assert min(len(groups) for groups in taken.values()) >= 5


def knows(outbox: Sender, receivers: int) -> bool:
    """Return whether a sender has heard from so many receivers."""
    links: dict[str, dict[str, Any]] = outbox.snapshot()["receivers"]  # type: ignore[assignment]
    return sum(link["ready"] for link in links.values()) == receivers

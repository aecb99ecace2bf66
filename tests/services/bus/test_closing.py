"""Closing senders and receivers: no task, thread or descriptor is left."""

import asyncio
import gc
import os
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from protocol.topics import SCORED, TOPICS, WEIGHTS
from services.bus.broadcast import Broadcaster, Listener
from services.bus.curve import create_keys
from services.bus.sender import Declined
from tests.services.bus.harness import (
    QUICK,
    RUN,
    Registry,
    acknowledge,
    background,
    eventually,
    receiver,
    score,
    sender,
)


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("run_loop", [asyncio.run, uvloop.run])
def test_cycles_leave_no_task_thread_or_descriptor(
    run_loop: Callable[[Coroutine[Any, Any, None]], None], tmp_path: Path
) -> None:
    create_keys(tmp_path)

    async def cycle(number: int) -> None:
        config = replace(QUICK, curve_dir=str(tmp_path)) if number % 5 == 0 else QUICK
        trainer = Broadcaster(WEIGHTS, run=RUN, incarnation="trainer.1", config=config)
        async with (
            receiver(config=config) as inbox,
            trainer,
            sender(Registry({"ingest.1": inbox.endpoint}), config=config) as outbox,
        ):
            registry = Registry({"trainer.1": trainer.endpoint})
            async with Listener(
                WEIGHTS, run=RUN, incarnation="rollout.1", role="rollout", config=config, discover=registry
            ):
                async with background(acknowledge(inbox, [])):
                    await outbox.send(score(1, "x" * 200_000))
                    await eventually(lambda: len(trainer.peers) == 1)

    async def main() -> None:
        await cycle(0)
        before = descriptors(), threads()
        for number in range(50):
            await cycle(number)
            assert len(asyncio.all_tasks()) == 1
        # A thread that was waited for is in /proc for a moment still, and what other tests have left may end
        # meanwhile.
        await eventually(lambda: descriptors() <= before[0] and threads() <= before[1])

    run_loop(main())


async def test_lost_links_release_their_descriptors() -> None:
    registry = Registry()
    counts: list[int] = []
    async with sender(registry) as outbox:
        for life in range(20):
            async with receiver(f"ingest.{life}") as inbox:
                registry[f"ingest.{life}"] = inbox.endpoint
                async with background(acknowledge(inbox, [])):
                    await outbox.send(score(life))
                registry.clear()
                await eventually(lambda: outbox.snapshot()["receivers"] == {})
            if life < 2:
                counts.append(descriptors())
        await eventually(lambda: descriptors() <= max(counts))


async def test_error_of_the_block_leaves_it_as_it_is() -> None:
    with pytest.raises(Declined, match="no"):
        async with sender(Registry()):
            raise Declined("no")


async def test_closing_twice_is_harmless() -> None:
    inbox = receiver()
    await inbox.start()
    await inbox.close()
    await inbox.close()


async def test_a_receiver_whose_close_is_cancelled_has_closed_its_socket() -> None:
    inbox = receiver()
    await inbox.start()
    closing = inbox.close()
    closing.send(None)  # runs up to the wait
    with pytest.raises(asyncio.CancelledError):
        closing.throw(asyncio.CancelledError())
    number = list(TOPICS).index(SCORED.name)
    first = int(inbox.endpoint.rpartition(":")[2]) - number
    async with receiver(config=replace(QUICK, port_base=first)) as other:
        assert other.endpoint == inbox.endpoint

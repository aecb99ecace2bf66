"""Batches of calls: who sends, what joins, and what an error or a cancellation leaves behind."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from services.ledger.redis.batches import MAX_CALLS, Batches, Word

Commands = Sequence[tuple[Word, ...]]


class Server:
    """Answers each command with its last word, once `open` is set; notes what it was sent."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.sent: list[list[Word]] = []
        self.busy = self.busiest = 0

    async def send(self, commands: Commands) -> Sequence[Any]:
        self.sent.append([words[-1] for words in commands])
        self.busy += 1
        self.busiest = max(self.busy, self.busiest)
        try:
            await self.open.wait()
        finally:
            self.busy -= 1
        return [words[-1] for words in commands]


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_calls_of_one_iteration_are_one_batch_in_their_order() -> None:
    server = Server()
    batches = Batches(server.send, lanes=2)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(batches("GET", index)) for index in range(10)]
    assert [task.result() for task in tasks] == list(range(10))
    assert server.sent == [list(range(10))]


async def test_calls_that_come_meanwhile_wait_for_a_lane_and_go_together() -> None:
    server = Server()
    server.open.clear()
    batches = Batches(server.send, lanes=2)
    async with asyncio.TaskGroup() as group:
        tasks = []
        for index in range(6):
            tasks.append(group.create_task(batches("GET", index)))
            await settle()
        assert server.sent == [[0], [1]]
        server.open.set()
    assert [task.result() for task in tasks] == list(range(6))
    assert server.sent[2:] == [[2, 3, 4, 5]]
    assert server.busiest == 2


async def test_batches_are_bounded() -> None:
    server = Server()
    batches = Batches(server.send, lanes=1)
    async with asyncio.TaskGroup() as group:
        for index in range(2 * MAX_CALLS + 1):
            group.create_task(batches("GET", index))
    assert [len(batch) for batch in server.sent] == [MAX_CALLS, MAX_CALLS, 1]
    assert server.busiest == 1


async def test_error_of_one_command_is_raised_to_its_caller_only() -> None:
    async def send(commands: Commands) -> Sequence[Any]:
        return [KeyError(words[-1]) if words[-1] == 1 else words[-1] for words in commands]

    batches = Batches(send, lanes=1)
    results = await outcomes(batches, 3)
    assert [type(result) for result in results] == [int, KeyError, int]
    assert await batches("GET", 5) == 5


async def test_batch_that_fails_is_raised_to_all_its_callers() -> None:
    async def send(commands: Commands) -> Sequence[Any]:
        raise ConnectionError("gone")

    batches = Batches(send, lanes=1)
    assert [str(result) for result in await outcomes(batches, 3)] == ["gone"] * 3
    with pytest.raises(ConnectionError):
        await batches("GET", 0)


async def outcomes(batches: Batches, calls: int) -> list[Any]:
    """Return result or exception of so many calls at once."""

    async def one(index: int) -> Any:
        try:
            return await batches("GET", index)
        except (KeyError, ConnectionError) as error:
            return error

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index)) for index in range(calls)]
    return [task.result() for task in tasks]


async def test_cancelled_sender_leaves_its_batch_to_the_others() -> None:
    server = Server()
    server.open.clear()
    batches = Batches(server.send, lanes=1)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(batches("GET", index)) for index in range(4)]
        await settle()
        tasks[0].cancel()
        await settle()
        server.open.set()
    assert tasks[0].cancelled()
    assert [task.result() for task in tasks[1:]] == [1, 2, 3]
    assert server.sent == [[0, 1, 2, 3], [1, 2, 3]]


async def test_cancelled_call_that_waits_is_never_sent() -> None:
    server = Server()
    server.open.clear()
    batches = Batches(server.send, lanes=1)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(batches("GET", 0))
        await settle()
        waiting = group.create_task(batches("GET", 1))
        await settle()
        waiting.cancel()
        await settle()
        server.open.set()
    assert first.result() == 0
    assert server.sent == [[0]]


@pytest.mark.parametrize("cancel_at", range(6))
async def test_cancellation_at_any_moment_keeps_lanes_and_answers(cancel_at: int) -> None:
    server = Server()
    batches = Batches(server.send, lanes=2)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(batches("GET", index)) for index in range(3 * MAX_CALLS)]
        for _ in range(cancel_at):
            await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
    answered = {index: task.result() for index, task in enumerate(tasks) if not task.cancelled()}
    assert all(index == answer for index, answer in answered.items())
    assert {index for index in range(len(tasks)) if index % 3} <= set(answered)
    server.open.clear()
    async with asyncio.TaskGroup() as group:
        for index in range(3):
            group.create_task(batches("GET", index))
            await settle()
        assert server.busy == 2  # no lane was lost
        server.open.set()

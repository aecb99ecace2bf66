"""Tests calls to ranks over Unix sockets: answers, refusals, lost ranks, framing."""

import asyncio
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from protocol.errors import EngineError
from rollout.engines.multi_process.rank_rpc import (
    MAX_FRAME,
    Answer,
    RankCall,
    RankRpcClient,
    RankRpcServer,
    frame,
    socket_path,
)

DEADLINE_S = 20


def serve(directory: Path, rank: int, answer: Callable[[RankCall], Answer]) -> RankRpcServer:
    """A rank that answers at once, from its reading thread."""
    servers: list[RankRpcServer] = []
    servers.append(RankRpcServer(socket_path(directory, rank), lambda call: servers[0].answer(answer(call))))
    return servers[0]


async def connected(directory: Path, ranks: int, on_lost: Callable[[], None] = lambda: None) -> RankRpcClient:
    calls = RankRpcClient("e.1", on_lost)
    await calls.connect([socket_path(directory, rank) for rank in range(ranks)])
    return calls


async def test_call_to_rank_zero_is_answered_by_every_rank(tmp_path: Path) -> None:
    other = RankRpcServer(socket_path(tmp_path, 1), lambda call: pytest.fail("rank 1 was asked"))

    def both(call: RankCall) -> Answer:
        other.answer(Answer(call.number, "one"))
        return Answer(call.number, [call.method, *call.arguments])

    serve(tmp_path, 0, both)
    calls = await connected(tmp_path, 2)
    assert await calls.call("ask", b"bytes", 2.5) == [["ask", b"bytes", 2.5], "one"]
    calls.close()


def test_answer_given_before_the_connection_is_accepted_is_not_lost(tmp_path: Path) -> None:
    server = RankRpcServer(socket_path(tmp_path, 1), lambda call: None)
    early = threading.Thread(target=server.answer, args=(Answer(7, "early"),))
    early.start()
    with socket.socket(socket.AF_UNIX) as engine:
        engine.settimeout(DEADLINE_S)
        engine.connect(str(socket_path(tmp_path, 1)))
        assert engine.recv(100) == frame(Answer(7, "early"))
    early.join()


async def test_refusal_of_a_rank_is_an_error_with_its_message(tmp_path: Path) -> None:
    serve(tmp_path, 0, lambda call: Answer(call.number, error=f"no {call.method} here"))
    calls = await connected(tmp_path, 1)
    with pytest.raises(EngineError, match="rank 0: no dance here"):
        await calls.call("dance")
    calls.close()


async def test_late_answer_of_a_cancelled_call_is_not_that_of_the_next(tmp_path: Path) -> None:
    held: asyncio.Queue[RankCall] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    server = RankRpcServer(socket_path(tmp_path, 0), lambda call: put(loop, held, call))
    calls = await connected(tmp_path, 1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await calls.call("first")
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        second = tasks.create_task(calls.call("second"))
        for _ in range(2):
            call = await held.get()
            server.answer(Answer(call.number, call.method))
    assert second.result() == ["second"]
    calls.close()


async def test_lost_rank_fails_waiting_calls_and_is_reported_once(tmp_path: Path) -> None:
    lost: list[bool] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(socket_path(tmp_path, 0)))
        listener.listen()
        calls = await connected(tmp_path, 1, lambda: lost.append(True))
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(refused(calls))
            peer, _ = await asyncio.to_thread(listener.accept)
            peer.close()
        assert "has ended" in waiting.result()
    assert "has ended" in await refused(calls)
    assert lost == [True]
    calls.close()


def put(loop: asyncio.AbstractEventLoop, queue: "asyncio.Queue[RankCall]", call: RankCall) -> None:
    loop.call_soon_threadsafe(queue.put_nowait, call)


async def refused(calls: RankRpcClient) -> str:
    with pytest.raises(EngineError) as error:
        await calls.call("anything")
    return str(error.value)


async def test_too_long_frame_ends_the_connection(tmp_path: Path) -> None:
    serve(tmp_path, 0, lambda call: Answer(call.number, call.method))
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(DEADLINE_S)
        stranger.connect(str(socket_path(tmp_path, 0)))
        stranger.sendall((MAX_FRAME + 1).to_bytes(4, "big"))
        assert await asyncio.to_thread(stranger.recv, 1) == b""
    calls = await connected(tmp_path, 1)  # the next one is served
    assert await calls.call("next") == ["next"]
    calls.close()


async def test_missing_rank_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"rank0\.sock"):
        await connected(tmp_path, 1)


def test_calls_work_on_the_services_event_loop(tmp_path: Path) -> None:
    serve(tmp_path, 0, lambda call: Answer(call.number, call.method))

    async def ask() -> list[object]:
        calls = await connected(tmp_path, 1)
        try:
            return await calls.call("ask")
        finally:
            calls.close()

    assert uvloop.run(ask()) == ["ask"]


def test_frame_is_its_length_and_an_array() -> None:
    assert frame(RankCall(1, "a", [])) == b"\x00\x00\x00\x05\x93\x01\xa1a\x90"

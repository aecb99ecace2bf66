"""Both ends of a connection that carries lines of JSON and raw bytes."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from protocol.host.line_connection import LineConnection, TimedLine

LONGEST = 100


def remaining() -> float:
    return 30.0


@pytest.fixture
def ends() -> Iterator[tuple[LineConnection, LineConnection]]:
    near, far = socket.socketpair()
    with (
        closing(LineConnection(near, "the far end", LONGEST)) as one,
        closing(LineConnection(far, "the near end", LONGEST)) as other,
    ):
        yield one, other


def test_lines_and_the_bytes_behind_them_arrive_in_order(ends: tuple[LineConnection, LineConnection]) -> None:
    near, far = ends
    far.send({"a": 1}, remaining, b"x" * 1000)
    far.send({"b": 2}, remaining)
    assert near.receive(remaining) == {"a": 1}
    assert near.raw(1000, remaining) == b"x" * 1000
    assert TimedLine(near, remaining).receive() == {"b": 2}
    assert TimedLine(near, remaining).receive() is None
    assert not near.disconnected()


def test_lines_of_other_values_are_empty_objects(ends: tuple[LineConnection, LineConnection]) -> None:
    near, far = ends
    far.send_raw(b"[1]\nnull\n", remaining)
    assert [near.receive(remaining), near.receive(remaining)] == [{}, {}]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"x" * (LONGEST + 1), "the far end sent no line of JSON"),
        (b"half", "the far end disconnected within"),
    ],
)
def test_a_refusal_of_a_line_names_the_other_end(
    ends: tuple[LineConnection, LineConnection], data: bytes, problem: str
) -> None:
    near, far = ends
    far.send_raw(data, remaining)
    far.close()
    with pytest.raises((OSError, ValueError), match=problem):
        near.receive(remaining)


def test_a_disconnect_is_noticed_once_all_bytes_are_read(ends: tuple[LineConnection, LineConnection]) -> None:
    near, far = ends
    far.send({"a": 1}, remaining, b"rest")
    far.close()
    assert near.receive(remaining) == {"a": 1}
    assert near.readable()
    assert not near.disconnected()
    assert near.raw(4, remaining) == b"rest"
    assert near.disconnected()
    assert near.receive(remaining) is None
    with pytest.raises(ConnectionError, match="the far end disconnected"):
        TimedLine(near, remaining).receive()
    near.close()
    assert near.disconnected()
    with pytest.raises(ConnectionError, match="was closed"):
        near.readable()


def test_shutting_down_wakes_a_thread_that_waits(ends: tuple[LineConnection, LineConnection]) -> None:
    near, _ = ends
    received: list[object] = []
    thread = threading.Thread(target=lambda: received.append(near.receive(remaining)))
    thread.start()
    near.shut_down()
    thread.join(30)
    assert received == [None]

"""Two ends of a connection that create a process group over it."""

import queue
import threading
from typing import Any

import pytest
import torch

from protocol.device.pair_group import RECEIVER, SENDER, abort, join_pair

SECONDS = 30.0


class QueueLine:
    """One end of a connection within this process."""

    def __init__(self, out: "queue.Queue[dict[str, Any]]", back: "queue.Queue[dict[str, Any]]") -> None:
        self._out, self._back = out, back

    def send(self, message: dict[str, Any]) -> None:
        self._out.put(message)

    def receive(self) -> dict[str, Any] | None:
        try:
            found = self._back.get_nowait()
        except queue.Empty:
            return None
        if "left" in found:
            raise ConnectionError("the other end left")
        return found


def ends() -> tuple[QueueLine, QueueLine]:
    one: queue.Queue[dict[str, Any]] = queue.Queue(100)
    other: queue.Queue[dict[str, Any]] = queue.Queue(100)
    return QueueLine(one, other), QueueLine(other, one)


def test_both_ends_get_a_group_over_their_connection() -> None:
    lines, groups = ends(), {}

    def join(rank: int) -> None:
        groups[rank] = join_pair(lines[rank], rank, torch.device("cpu"), SECONDS)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (SENDER, RECEIVER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sent, received = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    works = [groups[SENDER].broadcast([sent]), groups[RECEIVER].broadcast([received])]
    for work in works:
        work.wait()
    assert torch.equal(received, sent)
    assert [line.receive() for line in lines] == [None, None]  # nothing is left on the connection
    for group in groups.values():
        abort(group)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"left": True}, ConnectionError),
        ({"key": 1, "value": ""}, ValueError),
        ({"key": "a", "value": "not hexadecimal"}, ValueError),
        ({"ready": True}, ValueError),
    ],
)
def test_another_end_that_leaves_or_sends_no_entry_is_an_error_at_once(
    message: dict[str, Any], error: type[Exception]
) -> None:
    mine, other = ends()
    other.send(message)
    with pytest.raises(error):
        join_pair(mine, RECEIVER, torch.device("cpu"), SECONDS)


def test_another_end_that_never_stops_to_send_entries_is_an_error() -> None:
    mine, other = ends()

    class Endless(QueueLine):
        def receive(self) -> dict[str, Any] | None:
            other.send({"key": "again", "value": "00"})
            return super().receive()

    endless = Endless(mine._out, mine._back)
    with pytest.raises(ValueError, match="no entry of its store"):
        join_pair(endless, RECEIVER, torch.device("cpu"), SECONDS)

"""Tests how hosts meet, refuse each other, and end together, in threads of one process over a real store."""

import contextlib
import queue
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from protocol.errors import SettingsError, TetherError
from trainer.config import ClusterConfig
from trainer.hosts.meeting import Consequence, Ending, HeartbeatMonitor, HostFacts, Meeting
from trainer.hosts.place import HostPlace

LIMIT_S = 60.0


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def host(
    number: int, port: int, *, hosts: int = 2, join_s: float = LIMIT_S, silence_s: float = 30.0
) -> Meeting:
    config = ClusterConfig(
        nodes=hosts, rendezvous=f"127.0.0.1:{port}", join_timeout_s=join_s, peer_timeout_s=silence_s
    )
    place = HostPlace(number, hosts, "127.0.0.1", port, "a test")
    return Meeting(place, config, HostFacts(f"name-{number}", 100 + number))


def goes(first: HostFacts) -> None:
    assert first.name == "name-0"


def refuses(first: HostFacts) -> None:
    raise SettingsError("host 1 has other settings")


@contextlib.contextmanager
def met(port: int, threads: ThreadPoolExecutor, silence_s: float = 30.0) -> Iterator[tuple[Meeting, Meeting]]:
    """Two hosts that have met."""
    hosts = host(0, port, silence_s=silence_s), host(1, port)
    ports = [joining.result(LIMIT_S) for joining in [threads.submit(h.join, goes) for h in hosts]]
    assert ports[0] == ports[1]
    try:
        yield hosts
    finally:
        leave_all(*hosts, threads=threads)


def leave_all(*hosts: Meeting, threads: ThreadPoolExecutor) -> None:
    leaving: list[Future[None]] = [threads.submit(each.leave) for each in reversed(hosts)]
    for left in leaving:
        left.result(LIMIT_S)


def test_hosts_that_met_end_well_together(port: int, threads: ThreadPoolExecutor) -> None:
    endings: queue.Queue[Ending] = queue.Queue()
    with met(port, threads) as hosts:
        for each in hosts:
            each.watch(endings.put)
    assert endings.empty()


def test_the_ending_of_one_host_reaches_the_others(port: int, threads: ThreadPoolExecutor) -> None:
    endings: queue.Queue[Ending] = queue.Queue()
    ending = Ending(Consequence.REFUSED, "a rank of host 0 ended with 2")
    with met(port, threads) as (zero, one):
        one.watch(endings.put)
        zero.leave(ending)
        assert endings.get(timeout=LIMIT_S) == ending


def test_a_host_that_is_started_again_ends_the_others(port: int, threads: ThreadPoolExecutor) -> None:
    endings: queue.Queue[Ending] = queue.Queue()
    with met(port, threads) as (zero, one):
        zero.watch(endings.put)
        one.leave()  # as if killed
        again = threads.submit(host(1, port, join_s=1.0).join, goes)
        ending = endings.get(timeout=LIMIT_S)
        assert ending == Ending(Consequence.RESTART, "host 1 of the trainer (name-1) was started again")
        with pytest.raises(TetherError, match="last start has not ended there"):
            again.result(LIMIT_S)


def test_a_silent_host_ends_the_others(port: int, threads: ThreadPoolExecutor) -> None:
    endings: queue.Queue[Ending] = queue.Queue()
    with met(port, threads, 1.5) as (zero, one):
        one.leave()  # as if killed: it beats no more, and nobody starts it again
        zero.watch(endings.put)
        ending = endings.get(timeout=LIMIT_S)
        assert (ending.consequence, "from host 1 of the trainer for 1.5 s" in ending.reason) == (
            Consequence.RESTART,
            True,
        )


def test_two_hosts_of_one_number_are_refused(port: int, threads: ThreadPoolExecutor) -> None:
    with met(port, threads):
        with pytest.raises(
            SettingsError, match=r"cluster.node_rank: 1 is the number of the process 101 on name-1"
        ):
            host(1, port).join(goes)


def test_a_host_that_does_not_go_with_the_first_ends_all(port: int, threads: ThreadPoolExecutor) -> None:
    zero, one = host(0, port), host(1, port)
    joining = [threads.submit(zero.join, goes), threads.submit(one.join, refuses)]
    for each in joining:
        with pytest.raises(SettingsError, match="host 1 has other settings"):
            each.result(LIMIT_S)
    zero.leave(Ending(Consequence.REFUSED, ""))


def test_hosts_that_never_come_are_counted_and_named(port: int, threads: ThreadPoolExecutor) -> None:
    zero, two = host(0, port, hosts=4, join_s=2.0), host(2, port, hosts=4)
    joining = [threads.submit(each.join, goes) for each in (zero, two)]
    said = "2 of 4 hosts of the trainer came within 2 s .cluster.join_timeout_s.; missing: 1, 3"
    for each in joining:
        with pytest.raises(TetherError, match=said):
            each.result(LIMIT_S)
    zero.leave(Ending(Consequence.RESTART, ""))


def test_a_first_host_that_never_comes_is_named() -> None:
    with socket.socket() as held:  # bound and not listening, so that no other program answers there
        held.bind(("127.0.0.1", 0))
        with pytest.raises(TetherError, match=r"host 0 did not answer within 1 s .*TETHER_NODE_RANK=0"):
            host(1, held.getsockname()[1], join_s=1.0).join(goes)


def test_a_host_that_never_beats_is_silent_after_the_limit() -> None:
    beats = HeartbeatMonitor([1, 2], 10.0, 100.0)
    beats.note(1, 0, 101.0)
    assert beats.numbers == [1, 2]
    assert beats.silent(110.0) == []
    assert beats.silent(110.5) == [2]
    assert beats.silent(111.5) == [1, 2]


def test_a_counter_that_does_not_rise_is_no_sign_of_life() -> None:
    beats = HeartbeatMonitor([1], 10.0, 0.0)
    for now in range(1, 9):
        beats.note(1, now, float(now))
    for now in range(9, 19):
        beats.note(1, 8, float(now))
    assert beats.silent(18.0) == []
    assert beats.silent(18.1) == [1]
    beats.note(1, 9, 18.1)
    assert beats.silent(18.2) == []

"""Connects the hosts of a trainer through a store on host 0, monitors them, and ends them together.

A generation is one process of host 0 and its store, which has these keys:

    host/N    facts about host N, registered once; a second registration ends the generation
    ready/N   host N has compared itself with host 0
    port      port where torchrun's agents meet; set by host 0 once all hosts are ready
    beat/N    counter that host N increments
    end       why the generation has ended; set once, by any host
    left      number of hosts that ended successfully

The ranks of one host cannot run without the other hosts, so all hosts end when one ends. Their supervisor
restarts them; they meet in the next generation, and rank 0 resumes from the newest checkpoint.
"""

import datetime
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

import msgspec
from torch._C._distributed_c10d import TCPStore

from protocol.errors import SettingsError, TetherError
from protocol.ids import new_incarnation
from trainer.config import ClusterConfig
from trainer.hosts.place import HostPlace

log = logging.getLogger("tether.hosts")

BEAT_S = 0.5
"""Interval between two beats of a host, and between two reads of the other hosts' state, seconds."""
LOG_S = 30.0
"""Interval between two log lines during a wait, seconds."""
CALL_S = 10.0
"""Timeout for connecting to the store, seconds."""


class HostFacts(msgspec.Struct, frozen=True):
    """Facts that a host publishes about itself."""

    name: str
    """Name of the machine."""
    pid: int
    marker: str = ""
    """Host 0: name of a file that exists in each shared directory during the meeting."""
    settings: dict[str, Any] = {}
    """Dotted name -> value of settings that must be equal on all hosts."""
    incarnation: str = ""
    """Identity of the process, set by `Meeting`."""


class Consequence(StrEnum):
    """Action of every host after the end of a generation."""

    RESTART = "restart"
    """The trainer is restarted."""
    REFUSED = "refused"
    """The user must change something first."""
    STOPPED = "stopped"
    """No restart: the trainer was asked to stop."""


class Ending(msgspec.Struct, frozen=True):
    """Why a generation has ended."""

    consequence: Consequence
    reason: str


class HeartbeatMonitor:
    """Counters of other hosts, and the times of their last increments."""

    def __init__(self, numbers: Iterable[int], limit_s: float, now: float) -> None:
        """Expect an increment from every host in `numbers` within `limit_s` seconds from `now`."""
        self._limit_s = limit_s
        self._seen = dict.fromkeys(numbers, (-1, now))

    @property
    def numbers(self) -> list[int]:
        """Hosts that are monitored."""
        return list(self._seen)

    def note(self, number: int, count: int, now: float) -> None:
        """Record the counter of a host at time `now`."""
        if count != self._seen[number][0]:
            self._seen[number] = (count, now)

    def silent(self, now: float) -> list[int]:
        """Return the hosts whose counter has not increased within the limit."""
        return [number for number, (_, since) in self._seen.items() if now - since > self._limit_s]


class Meeting:
    """One host's membership in a generation."""

    def __init__(self, place: HostPlace, config: ClusterConfig, facts: HostFacts) -> None:
        self._place, self._config = place, config
        self._facts = msgspec.structs.replace(facts, incarnation=new_incarnation(f"host.{place.number}"))
        self._server: TCPStore | None = None
        self._store: TCPStore | None = None
        self._left_event = threading.Event()
        self._watched_at = 0.0
        self._threads: list[threading.Thread] = []

    def join(self, check: Callable[[HostFacts], None]) -> int:
        """Wait until all hosts have joined.

        Args:
            check: called with host 0's facts; raises SettingsError if this host does not match.

        Returns:
            A free port of host 0 for torchrun's agents.

        Raises:
            SettingsError: a host does not match host 0, or another live process has this host's index.
            TetherError: a host is missing after `cluster.join_timeout_s`, or the generation has ended.
        """
        end = time.monotonic() + self._config.join_timeout_s
        while True:
            try:
                if self._register(end):
                    return self._gather(check, end)
                cause = "the trainer's last start has not ended there"
            except RuntimeError as error:  # the store: host 0 has ended and may restart
                cause = str(error)
            if self._place.number == 0 or time.monotonic() > end:
                raise TetherError(f"{self._setting()}: {cause}")
            time.sleep(BEAT_S)

    def watch(self, on_end: Callable[[Ending], None]) -> None:
        """Monitor the other hosts from now on; call `on_end` in a thread when the generation ends."""
        self._watched_at = time.monotonic()
        once = threading.Lock()

        def end(ending: Ending) -> None:
            if once.acquire(blocking=False) and not self._left_event.is_set():
                on_end(ending)

        self._start(lambda: self._watch(end), "watch")
        self._start(lambda: self._report_stall(end), "guard")

    def leave(self, ending: Ending | None = None) -> None:
        """Leave the generation: end all hosts with an ending, or wait until all hosts end successfully.

        Host 0 stays until the other hosts can have read the ending, at most `cluster.peer_timeout_s`.
        """
        limit = time.monotonic() + (self._config.peer_timeout_s if ending is None else 4 * BEAT_S)
        if ending is not None:
            self._left_event.set()  # this host ignores the ending
        try:
            if self._store is not None:
                if ending is None:
                    self._store.add("left", 1)
                else:
                    self._set_end(ending)
            while self._server is not None and self._store is not None and time.monotonic() < limit:
                if ending is None and self._store.add("left", 0) >= self._place.hosts:
                    break
                time.sleep(BEAT_S / 5)
        except RuntimeError as error:
            log.debug("hosts.left_without_store error=%s", error)
        self._left_event.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2 * BEAT_S)

    def _register(self, end: float) -> bool:
        """Connect to the store and register; return False if the generation has ended or is ended here."""
        self._store = self._connect(end)
        mine, key = msgspec.json.encode(self._facts), f"host/{self._place.number}"
        theirs = self._store.compare_set(key, "", mine.decode())
        if self._ending() is not None:
            return False
        if theirs == mine:
            self._start(self._beat, "beat")
            return True
        other = msgspec.json.decode(theirs, type=HostFacts)
        beat = f"beat/{self._place.number}"
        before = self._store.add(beat, 0)
        time.sleep(4 * BEAT_S)
        if self._store.add(beat, 0) > before:
            raise SettingsError(
                f"setting cluster.node_rank: {self._place.number} is the number of the process {other.pid} "
                f"on {other.name}, which is running; set a unique node_rank per host"
            )
        reason = f"host {self._place.number} of the trainer ({self._facts.name}) was started again"
        self._set_end(Ending(Consequence.RESTART, reason))
        return False

    def _connect(self, end: float) -> TCPStore:
        """Return a connection to the store; on host 0, start the store first."""
        place = self._place
        if place.number == 0 and self._server is None:
            try:
                self._server = self._client(is_master=True)
            except RuntimeError as error:
                raise TetherError(
                    f"{self._setting()}: host 0 cannot listen on or connect to this address ({error}); is it "
                    "this machine's, and is the port free?"
                ) from None
        logged = time.monotonic()
        while True:
            try:  # probes first, because the store's client logs each failure
                socket.create_connection((place.address, place.port), timeout=CALL_S).close()
                return self._client()
            except OSError as error:
                cause = error
            now = time.monotonic()
            if now > end:
                raise TetherError(
                    f"{self._setting()}: host 0 did not answer within {self._config.join_timeout_s:g} s "
                    f"(cluster.join_timeout_s): {cause}; is it started, with TETHER_NODE_RANK=0?"
                )
            if now - logged > LOG_S:
                logged = now
                log.info("hosts.waiting for=0 cause=%s", cause)
            time.sleep(BEAT_S)

    def _gather(self, check: Callable[[HostFacts], None], end: float) -> int:
        """Wait until all hosts are ready; return the port that host 0 has set."""
        place, store = self._place, self._store
        assert store is not None
        if place.number == 0:
            store.set("ready/0", "1")
            self._wait_for([f"ready/{n}" for n in range(place.hosts)], end)
            store.set("port", str(_free_port()))
        else:
            self._wait_for(["ready/0"], end)
            try:
                check(msgspec.json.decode(store.get("host/0"), type=HostFacts))
            except SettingsError as error:
                self._set_end(Ending(Consequence.REFUSED, str(error)))
                raise
            store.set(f"ready/{place.number}", "1")
            self._wait_for(["port"], end)
        return int(store.get("port"))

    def _wait_for(self, keys: list[str], end: float) -> None:
        """Wait until the store has all keys.

        Raises:
            TetherError: the generation has ended, or the deadline has passed, which ends the generation.
        """
        store, logged = self._store, time.monotonic()
        assert store is not None
        while missing := [key for key in keys if not store.check([key])]:
            if ending := self._ending():
                refused = ending.consequence is Consequence.REFUSED
                raise SettingsError(ending.reason) if refused else TetherError(ending.reason)
            came, hosts = len(keys) - len(missing), self._place.hosts
            numbers = ", ".join(key.rpartition("/")[2] for key in missing)
            now = time.monotonic()
            if now > end:
                reason = (
                    f"{came} of {hosts} hosts of the trainer came within {self._config.join_timeout_s:g} s "
                    f"(cluster.join_timeout_s); missing: {numbers}. Start `python -m services.trainer` there "
                    "with its TETHER_NODE_RANK"
                    if self._place.number == 0
                    else f"{self._setting()}: host 0 still waited after {self._config.join_timeout_s:g} s "
                    "(cluster.join_timeout_s)"
                )
                self._set_end(Ending(Consequence.RESTART, reason))
                raise TetherError(reason)
            if now - logged > LOG_S:
                logged = now
                log.info("hosts.waiting came=%d of=%d missing=%s", came, hosts, numbers)
            time.sleep(BEAT_S / 2)

    def _beat(self) -> None:
        """Increment this host's counter until it leaves."""
        try:
            store = self._client()
            while not self._left_event.wait(BEAT_S):
                store.add(f"beat/{self._place.number}", 1)
        except RuntimeError as error:  # `_watch` detects the failure, too
            log.debug("hosts.beat_failed error=%s", error)

    def _watch(self, end: Callable[[Ending], None]) -> None:
        """Monitor the other hosts (host 0) or host 0 (other hosts) until this host leaves."""
        place = self._place
        others = range(1, place.hosts) if place.number == 0 else [0]
        beats = HeartbeatMonitor(others, self._config.peer_timeout_s, time.monotonic())
        try:
            store = self._client()
            while not self._left_event.wait(BEAT_S):
                if store.check(["end"]):
                    return end(msgspec.json.decode(store.get("end"), type=Ending))
                for number in beats.numbers:
                    beats.note(number, store.add(f"beat/{number}", 0), time.monotonic())
                self._watched_at = time.monotonic()
                if silent := beats.silent(self._watched_at):
                    return end(Ending(Consequence.RESTART, self._silence_reason(*silent)))
        except RuntimeError as error:
            end(Ending(Consequence.RESTART, f"host 0 at {place.address}:{place.port} has ended: {error}"))

    def _report_stall(self, end: Callable[[Ending], None]) -> None:
        """Report the end if `_watch` is blocked: a call to a disconnected host does not return."""
        while not self._left_event.wait(BEAT_S):
            if time.monotonic() - self._watched_at > self._config.peer_timeout_s:
                return end(Ending(Consequence.RESTART, self._silence_reason(0)))

    def _silence_reason(self, *numbers: int) -> str:
        return (
            f"no sign of life from host {', '.join(map(str, numbers))} of the trainer for "
            f"{self._config.peer_timeout_s:g} s (cluster.peer_timeout_s)"
        )

    def _ending(self) -> Ending | None:
        assert self._store is not None
        return (
            msgspec.json.decode(self._store.get("end"), type=Ending) if self._store.check(["end"]) else None
        )

    def _set_end(self, ending: Ending) -> None:
        assert self._store is not None
        self._store.compare_set("end", "", msgspec.json.encode(ending).decode())

    def _client(self, *, is_master: bool = False) -> TCPStore:
        return TCPStore(
            self._place.address,
            self._place.port,
            is_master=is_master,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=CALL_S),
        )

    def _start(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=f"hosts.{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _setting(self) -> str:
        return f"setting cluster.rendezvous: {self._config.rendezvous}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])

"""Describes the state of a run for the page, from the ledger."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from protocol.topics import Role
from services.ledger.interface import Ledger, Peer
from services.observability.printable import without_numbers
from services.observability.service_rows import wait_text
from services.observability.status import collect_status
from services.run_record.sentences import short_name
from services.settings.sections import Settings

WINDOW_S = 120.0
"""Age in seconds after which samples are discarded."""
SAMPLE_S = 1.0
"""Minimum seconds between two samples."""
SETTLED_S = 10.0
"""Minimum seconds covered by samples before a share is shown: busy times arrive with heartbeats."""
MAX_PROCESSES = 512


class ActivitySample(NamedTuple):
    """Activity of one process at one time."""

    time_s: float
    busy_s: float | None
    waits: frozenset[str]


class Activity:
    """Latest samples of every process of a run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without samples; `clock` returns seconds."""
        self._clock = clock
        self._samples: dict[str, deque[ActivitySample]] = {}
        self._trainers: frozenset[str] = frozenset()

    def observe(self, peers: Sequence[Peer]) -> None:
        """Sample the live processes, and discard the others."""
        now = self._clock()
        samples: dict[str, deque[ActivitySample]] = {}
        for peer in peers[:MAX_PROCESSES]:
            history = self._samples.get(peer.incarnation) or deque(maxlen=int(2 * WINDOW_S / SAMPLE_S))
            if not history or now - history[-1].time_s >= SAMPLE_S / 2:
                history.append(_sample(peer, now))
            while history[0].time_s < now - WINDOW_S:
                history.popleft()
            samples[peer.incarnation] = history
        self._samples = samples
        self._trainers = frozenset(peer.incarnation for peer in peers if peer.role == Role.TRAINER)

    def shares(self, incarnation: str) -> dict[str, Any]:
        """Return the shares of a process's time, each 0 to 1.

        Returns:
            `working` (None if unknown), `waits` (such as "waits for rewards", without numbers -> share),
            `window_s` (seconds between the first and the last sample).
        """
        samples = list(self._samples.get(incarnation, ()))
        if not samples:
            return {"working": None, "waits": {}, "window_s": 0.0}
        window_s = samples[-1].time_s - samples[0].time_s
        waits: dict[str, float] = {}
        idle = 0
        for sample in samples:
            for what in sample.waits:
                waits[what] = waits.get(what, 0.0) + 1 / len(sample.waits) / len(samples)
            idle += not sample.waits
        first, last = samples[0].busy_s, samples[-1].busy_s
        working: float | None = None
        if first is not None and last is not None:
            if window_s >= SETTLED_S:
                working = min(max((last - first) / window_s, 0.0), 1.0)
                waits = {what: share * (1 - working) for what, share in waits.items()}
        elif incarnation in self._trainers:
            working = idle / len(samples)
        return {
            "working": None if working is None else round(working, 3),
            "waits": {what: round(share, 3) for what, share in sorted(waits.items(), key=lambda i: -i[1])},
            "window_s": round(window_s, 1),
        }


def _sample(peer: Peer, now: float) -> ActivitySample:
    busy, waits = peer.info.get("busy_s"), peer.info.get("waits")
    names = waits if isinstance(waits, dict) else {}
    return ActivitySample(
        now,
        float(busy) if isinstance(busy, (int, float)) else None,
        frozenset(without_numbers(wait_text(peer.role, str(name)))[:120] for name in names),
    )


ENGINE_FIELDS = ("groups", "pause_ms")
"""Optional fields of rollout workers about their engine, in addition to `collect_status`."""


class LiveState:
    """State of a run whose ledger answers."""

    def __init__(self, ledger: Ledger, settings: Settings) -> None:
        """Store the arguments."""
        self._ledger = ledger
        self._settings = settings
        self._activity = Activity()

    async def collect(self) -> dict[str, Any]:
        """Return the result of `collect_status` with time shares of processes and states of engines.

        Raises:
            TetherError: the ledger does not answer, or lacks the run.
        """
        facts = await collect_status(self._ledger)
        peers = {peer.incarnation: peer for peer in await self._ledger.peers()}
        self._activity.observe(list(peers.values()))
        for process in facts["processes"]:
            process["time"] = self._activity.shares(process["incarnation"])
        for engine in facts["engines"]:
            engine |= self._describe_engine(engine["engine"], peers)
        return {**facts, "run": self._settings.run.name, "source": "ledger"}

    def _describe_engine(self, incarnation: str, peers: Mapping[str, Peer]) -> dict[str, Any]:
        peer = peers.get(incarnation)
        info: Mapping[str, Any] = peer.info if peer else {}
        numbers = {name: value for name in ENGINE_FIELDS if isinstance(value := info.get(name), (int, float))}
        return {
            "name": info.get("name", short_name(incarnation)),
            "kind": info.get("engine", self._settings.engine.name),
            "busy": self._activity.shares(incarnation)["working"],
            **numbers,
        }

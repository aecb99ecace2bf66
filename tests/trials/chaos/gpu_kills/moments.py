"""Says what a run was doing when a process was killed, and how long it took to recover.

These are functions of its event log and of what the witness heard.

Times are Unix time in milliseconds. The ledger's server is on the same host, so its clock is the witness's.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.trials.chaos.gpu_kills.layouts import Moment, Part, Target

Event = Mapping[str, Any]
"""A line of audit.jsonl."""


@dataclass(frozen=True, slots=True)
class Announced:
    """What the trainer announced to engines about a version."""

    at_ms: float
    moment: Moment
    epoch: str
    version: int


@dataclass(frozen=True, slots=True)
class Staged:
    """An engine's answer that it has a complete, verified copy."""

    at_ms: float
    engine: str
    epoch: str
    version: int
    digest: int


@dataclass(frozen=True, slots=True)
class Kill:
    """A process was killed during a transfer."""

    target: Target
    at_ms: float
    heard: Announced
    """The version that was on its way."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds from the kill to what followed it; None for what has not come."""

    served_s: float | None
    """To a version that the successor serves, or that the successor of the trainer has published."""
    step_s: float | None
    """To the next commit; of the trainer's successor, if the trainer was killed."""
    working_s: float | None
    """To the first commit with `served_s` behind it: from here on all work again."""
    rewound: int
    """Steps that the next trainer abandoned, because repeating them did not give the same weights."""


def transfers_ms(
    moment: Moment, announced: Iterable[Announced], staged: Iterable[Staged], events: Iterable[Event]
) -> list[float]:
    """Return how long versions were on their way after they were announced.

    After a draft that is until the commit, after a manifest until the first verified copy.
    """
    ends: dict[tuple[str, int], float] = {}
    if moment is Moment.MANIFEST:
        for answer in staged:
            ends.setdefault((answer.epoch, answer.version), answer.at_ms)
    else:
        for event in events:
            if event["event"] == "commit":
                ends[event["epoch"], event["version"]] = event["time_ms"]
    began = {(told.epoch, told.version): told.at_ms for told in announced if told.moment is moment}
    return [ends[key] - at_ms for key, at_ms in began.items() if key in ends]


def median_ms(values: Sequence[float]) -> float | None:
    """Return the median of the positive values, if there are any."""
    positive = [value for value in values if value > 0]
    return statistics.median(positive) if positive else None


def state_at(kill: Kill, events: Iterable[Event], staged: Iterable[Staged]) -> str:
    """Return how far the version had come when the process was killed."""
    key = (kill.heard.epoch, kill.heard.version)
    reached = {kind for kind, at_ms in _progress(key, events, staged) if at_ms <= kill.at_ms}
    if "applied" in reached:
        return NOT_IN_FLIGHT
    if "staged" in reached:
        return "staged, not served yet"
    return "committed, being received" if "commit" in reached else "being sent, not committed"


NOT_IN_FLIGHT = "served already"


def fate(kill: Kill, events: Sequence[Event]) -> str:
    """Return what became of the version: committed or not, and served by whom."""
    later = [event for event in events if event["time_ms"] > kill.at_ms]
    version, epoch = kill.heard.version, kill.heard.epoch
    commits = [event for event in events if event["event"] == "commit" and event["version"] == version]
    if not commits:
        return "never committed"
    by = "" if commits[-1]["epoch"] == epoch else " by the next trainer"
    for event in later:
        if event["event"] == "applied" and event["version"] >= version:
            what = "" if event["version"] == version else f" as {event['version']}"
            known = event["engine"] in _engines(events, kill.at_ms)
            return f"committed{by}, served{what} by the {'same' if known else 'next'} engine"
    return f"committed{by}, not served"


def recovery(kill: Kill, events: Sequence[Event]) -> Recovery:
    """Return what has followed the kill so far."""
    later = [event for event in events if event["time_ms"] > kill.at_ms]
    commits = [event for event in later if event["event"] == "commit"]
    applied = [event for event in later if event["event"] == "applied"]
    if kill.target.part is Part.TRAINER:
        known = {event["epoch"] for event in events if event["event"] == "claim"} - {
            event["epoch"] for event in later if event["event"] == "claim"
        }
        commits = [event for event in commits if event["epoch"] not in known]
        applied = [event for event in applied if event["epoch"] not in known]
    else:
        engines = _engines(events, kill.at_ms)
        applied = [event for event in applied if event["engine"] not in engines]
    served = _seconds(kill, applied)
    working = [] if served is None else [
        event for event in commits if event["time_ms"] >= applied[0]["time_ms"]
    ]  # fmt: skip
    rewinds = [event for event in later if event["event"] == "resume" and not event["continued"]]
    stood = max((event["version"] for event in events if event["event"] == "commit"
                 and event["time_ms"] <= kill.at_ms), default=0)  # fmt: skip
    rewound = max((stood - event["version"] for event in rewinds), default=0)
    return Recovery(served, _seconds(kill, commits), _seconds(kill, working), max(0, rewound))


def torn(staged: Iterable[Staged], events: Iterable[Event]) -> list[str]:
    """Return copies that engines had of a version whose digest is not the committed one."""
    known: dict[tuple[str, int], str] = {}
    for event in events:
        if event["event"] in ("commit", "resume"):
            known[event["epoch"], event["version"]] = event["digest"]
    return [
        f"{answer.engine} staged version {answer.version} with digest {answer.digest}, committed was "
        f"{known[answer.epoch, answer.version]}"
        for answer in staged
        if known.get((answer.epoch, answer.version), str(answer.digest)) != str(answer.digest)
    ]


def _progress(
    key: tuple[str, int], events: Iterable[Event], staged: Iterable[Staged]
) -> list[tuple[str, float]]:
    found = [("staged", answer.at_ms) for answer in staged if (answer.epoch, answer.version) == key]
    for event in events:
        if event["event"] in ("commit", "applied") and (event["epoch"], event["version"]) == key:
            found.append((event["event"], event["time_ms"]))
    return found


def _engines(events: Iterable[Event], at_ms: float) -> set[str]:
    """Engines that had served a version by then."""
    return {event["engine"] for event in events if event["event"] == "applied" and event["time_ms"] <= at_ms}


def _seconds(kill: Kill, events: Sequence[Event]) -> float | None:
    return round((events[0]["time_ms"] - kill.at_ms) / 1e3, 2) if events else None

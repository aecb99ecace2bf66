"""Describes the work or wait of each process of a run, for terminal and log."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from protocol.topics import Role
from services.ledger.interface import Peer

WORKS, WAITS, STARTS, MISSING = "works", "waits", "starts", "missing"
"""States of a row."""
ROOM = "room"
"""Prefix of the waits for space on the run directory's disk."""

_PHRASES: Sequence[tuple[str, str, str, str]] = (
    (Role.TRAINER, "groups", WAITS, "waits for rollouts and rewards"),
    (Role.TRAINER, "take-over", STARTS, "takes the run over"),
    (Role.TRAINER, "model load", STARTS, "loads the model"),
    (Role.TRAINER, "engines to sleep", WAITS, "waits for the engines to sleep"),
    (Role.ROLLOUT, "engine start", STARTS, "starts its engine"),
    (Role.EVALUATION, "engine start", STARTS, "starts its engine"),
    (Role.ROLLOUT, "the first weights", WAITS, "waits for the trainer's weights"),
    (Role.ROLLOUT, "a lease: the engine serves no version", WAITS, "waits for the trainer's weights"),
    (Role.ROLLOUT, "acknowledgement of group", WAITS, "waits for rewards"),
    (Role.ROLLOUT, "a lease: bound", WAITS, "waits for the trainer's next step (staleness bound)"),
    (Role.ROLLOUT, "a lease: busier", WAITS, "yields to workers with fewer groups"),
    (Role.ROLLOUT, "a lease: pending", WAITS, "waits for the new bound to be in force"),
    (Role.ROLLOUT, "a lease: stale_engine", WAITS, "waits for the trainer's weights"),
    (Role.ROLLOUT, "a lease: archive_behind", WAITS, "waits for the ingest to archive the event log"),
    (Role.ROLLOUT, "a lease: done", WAITS, "has nothing left to generate"),
    (Role.ROLLOUT, "a lease: exhausted", WAITS, "has no prompts left"),
    (Role.ROLLOUT, "a lease: draining", WAITS, "gets no more work: the run drains"),
    (Role.REWARD, "ingest for group", WAITS, "waits for the ingest"),
)
"""Role, prefix of a wait, state, and shown text; other waits are shown by name."""
NEEDED = (Role.ROLLOUT, Role.REWARD)
"""Roles whose number of processes may be 0, though a run makes no step without them."""
_IDLE = {
    Role.REWARD: "waits for rollouts",
    Role.INGEST: "waits for scored groups",
    Role.MONITOR: "serves the page",
    Role.EVALUATION: "waits for a version to score",
}
"""Text for processes that neither work nor wait."""


class Supervised(Protocol):
    """State of a child process."""

    @property
    def name(self) -> str:
        """Name in the registry, such as rollout.0."""

    @property
    def registers(self) -> bool:
        """Whether the process appears in the registry."""

    @property
    def restarts(self) -> int:
        """Number of restarts so far."""


@dataclass(frozen=True, slots=True)
class ServiceRow:
    """Activity of one process."""

    name: str
    state: str
    """works, waits, starts or missing."""
    text: str
    """Activity, such as "step 3" or "waits for rollouts"."""
    seconds: float | None = None
    """Duration in seconds; None if unknown."""
    restarts: int = 0

    def sentence(self) -> str:
        """Format the row: "trainer: step 3, 120 s so far"."""
        return f"{self.name}: {self.phrase()}"

    def phrase(self) -> str:
        """Format the activity: "step 3, 120 s so far"."""
        since = f", {self.seconds:.0f} s so far" if self.seconds is not None and self.seconds >= 1 else ""
        return f"{self.text}{since}"


def service_rows(
    peers: Iterable[Peer], expected: Mapping[str, int] | None = None, starting_s: float = 0.0
) -> list[ServiceRow]:
    """Return a row for each process.

    Args:
        peers: registered processes.
        expected: names of the expected processes -> number of restarts.
        starting_s: seconds since unregistered processes were first expected.
    """
    restarts = expected or {}
    by_name = {str(peer.info.get("name", peer.role)): peer for peer in peers}
    rows = [describe_process(name, peer, restarts.get(name, 0)) for name, peer in by_name.items()]
    rows += [
        ServiceRow(
            name, MISSING if count else STARTS, "starts again" if count else "starts", starting_s, count
        )
        for name, count in restarts.items()
        if name not in by_name
    ]
    order = list(restarts) or sorted(by_name)
    return sorted(rows, key=lambda row: order.index(row.name) if row.name in order else len(order))


def scaled_to_zero(peers: Iterable[Peer], children: Mapping[Any, Sequence[Supervised]]) -> list[str]:
    """Return a sentence for each role in `NEEDED` without a process, of `tether up` or registered."""
    roles = {peer.role for peer in peers}
    empty = (role for role in NEEDED if role in children and not children[role] and role not in roles)
    return [f"{role}s are scaled to 0: no step is made without one" for role in empty]


def describe_process(name: str, peer: Peer, restarts: int = 0) -> ServiceRow:
    """Return the activity of a registered process.

    A full disk takes precedence over work, and work over other waits. The longest wait is shown.
    """
    waits: Mapping[str, float] = peer.info.get("waits", {})
    if full := next((what for what in waits if what.startswith(ROOM)), ""):
        return ServiceRow(name, WAITS, f"waits for {full}", waits[full], restarts)
    work = _work_of(peer, waits)
    if work is not None:
        return ServiceRow(name, WORKS, work[0], work[1], restarts)
    if waits:
        what = max(waits, key=lambda item: waits[item])
        state, text = _phrase(peer.role, what, len(waits))
        return ServiceRow(name, state, text, waits[what], restarts)
    role = Role(peer.role) if peer.role in set(Role) else None
    text = _IDLE.get(role, "is ready") if role else "is ready"
    return ServiceRow(name, WAITS if text.startswith("waits") else WORKS, text, None, restarts)


def _work_of(peer: Peer, waits: Mapping[str, float]) -> tuple[str, float | None] | None:
    """Return a process's current work and its seconds, if it reports them."""
    work: Mapping[str, Sequence[float]] = peer.info.get("work", {})
    if work:
        what, (count, seconds) = max(work.items(), key=lambda item: item[1][1])
        return (f"{what} ({count:.0f} at a time)" if count > 1 else what), seconds
    if peer.role == Role.ROLLOUT:
        delivering = sum(what.startswith("acknowledgement") for what in waits)
        generating = int(peer.info.get("groups", 0)) - delivering
        if generating > 0:
            return f"generates {generating} group{'s' if generating > 1 else ''}", None
    return None


def wait_text(role: str, activity: str) -> str:
    """Return a wait of a process as text, such as "waits for rewards"."""
    known = (text for known, begin, _, text in _PHRASES if known == role and activity.startswith(begin))
    return next(known, f"waits for {activity}")


def _phrase(role: str, activity: str, count: int) -> tuple[str, str]:
    for known, begin, state, text in _PHRASES:
        if known == role and activity.startswith(begin):
            detail = activity.removeprefix(begin).removeprefix(": ").strip()
            if role == Role.TRAINER and detail:
                late = detail.removeprefix("straggler: ")
                shown = f"group {late} is late" if late != detail else detail.removeprefix("not_enough: ")
                return state, f"{text}: {shown}"
            if "group" in begin:
                return state, f"{text} ({count} group{'s' if count > 1 else ''})"
            return state, text
    return WAITS, f"waits for {activity}"

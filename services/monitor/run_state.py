"""Describes the state of a run for the page: from the ledger, or from the run directory."""

from collections.abc import Mapping
from typing import Any

from services.ledger.interface import Ledger, Peer
from services.monitor.activity import Activity
from services.monitor.event_tail import EventTail
from services.monitor.sentences import short_name
from services.observability.status import collect_status
from services.settings.sections import Settings

ENGINE_FIELDS = ("groups", "running", "kv_use", "pause_ms")
"""What rollout workers may say of their engine in the registry; shown if it is there."""


class LiveState:
    """The state of a run whose ledger answers."""

    def __init__(self, ledger: Ledger, settings: Settings) -> None:
        """Ask nothing yet."""
        self._ledger = ledger
        self._settings = settings
        self._activity = Activity()

    async def collect(self) -> dict[str, Any]:
        """Return what `collect_status` returns, with the time shares of processes and the state of engines.

        Raises:
            TetherError: the ledger does not answer, or has no such run.
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


def recorded_state(settings: Settings, last: Mapping[str, Any], tail: EventTail) -> dict[str, Any]:
    """Return what a run's files say of it, with the fields of `LiveState.collect`; no process is known.

    `last` is the newest line of metrics.jsonl.
    """
    logged = tail.state()
    version = max(int(last.get("version", 0)), logged["version"])
    steps = logged.get("steps", settings.run.steps)
    halted = logged["halted"]
    bound = logged["bound"] or {
        "max_staleness": settings.bound.max_staleness,
        "groups_per_step": settings.bound.groups_per_step,
        "policy": str(settings.bound.staleness_policy),
    }
    return {
        "run": settings.run.name,
        "source": "files",
        "run_state": "done" if version >= steps else f"halted: {halted}" if halted else "not running",
        "version": version,
        "steps": steps,
        "epoch": logged["epoch"] or last.get("epoch", ""),
        "bound": bound,
        "pending_bound": None,
        "issued": logged.get("issued"),
        "trained": logged.get("trained"),
        "dropped": logged.get("dropped"),
        "active": logged.get("active"),
        "wasted_tokens": None,
        "groups": {},
        "dropped_by_reason": logged["dropped_by_reason"],
        "drops_since_event": logged["drops_since_event"],
        "processes": [],
        "engines": [],
    }

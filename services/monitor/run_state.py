"""Describes the state of a run for the page, from the ledger."""

from collections.abc import Mapping
from typing import Any

from services.ledger.interface import Ledger, Peer
from services.monitor.activity import Activity
from services.observability.status import collect_status
from services.run_record.sentences import short_name
from services.settings.sections import Settings

ENGINE_FIELDS = ("groups", "pause_ms")
"""Optional fields of rollout workers about their engine, in addition to `collect_status`'s."""


class LiveState:
    """The state of a run whose ledger answers."""

    def __init__(self, ledger: Ledger, settings: Settings) -> None:
        """Store the arguments."""
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

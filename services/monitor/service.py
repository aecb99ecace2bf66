"""Runs `python -m services.monitor`: a read-only web page and metrics of a run.

Reads: the ledger's status and registry, metrics.jsonl, the event log, and records of past steps. Waits for:
the run in the ledger.
"""

import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protocol.topics import Role
from services.monitor.access import guard, page_url
from services.monitor.pages import Pages
from services.monitor.run_state import LiveState
from services.observability.http import HttpServer
from services.run_record.page_key import access_key
from services.run_record.steps import numbers_of
from services.runtime.event_loop import running_loops
from services.runtime.main import service_main
from services.runtime.process import Process
from services.runtime.prompt_stream import wait_for_run

log = logging.getLogger("tether.monitor")

REFRESH_S = 1.0
"""Seconds between two reads of the ledger and of the files."""


async def serve(process: Process) -> None:
    """Serve the page until the process is stopped."""
    settings = process.settings
    config = settings.monitor
    key = access_key(config.host, config.key_file, settings.run_dir)
    snapshot: dict[str, Any] = {}
    gauges = RunGauges(process.metrics.registry)
    state = LiveState(process.ledger, settings)
    pages = Pages(settings, lambda: snapshot)
    server = HttpServer(
        process.metrics.registry,
        lambda: {"ok": True, "run": process.run},
        pages.routes(),
        [guard(key)],
    )
    port = await server.start(config.host, config.port)
    process.info["page"] = page_url(config.host, port, "")  # `tether status` adds the key from its file
    await process.register()
    log.info("monitor.serving url=%s", process.info["page"])
    try:
        async with running_loops({"monitor.read": pages.read_loop(REFRESH_S)}):
            await wait_for_run(process)
            while not await process.stopped_within(REFRESH_S):
                snapshot.update(await state.collect())
                gauges.set(snapshot, pages.history.last)
    finally:
        await server.close()


class RunGauges(Collector):
    """Prometheus metrics of the run.

    These are `tether_run_*`, `tether_engine_*` for each engine, and the newest step's numbers as
    `tether_step`. Unknown and unmeasured values have no sample.
    """

    NAMES = ("version", "steps", "issued", "trained", "dropped", "active", "wasted_tokens")

    ENGINE = MappingProxyType(
        {
            "running": "Requests in the engine's batch",
            "kv_use": "Share of the engine's KV cache in use",
            "prefix_hits": "Share of prompts' tokens whose KV was in the engine's prefix cache",
            "drafts_accepted": "Share of drafted tokens that the engine accepted",
        }
    )
    """Engine number -> help text."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register the metrics, which have no samples before the first `set`."""
        self._state: Mapping[str, Any] = {}
        self._step: Mapping[str, Any] = {}
        registry.register(self)

    def set(self, state: Mapping[str, Any], step: Mapping[str, Any]) -> None:
        """Store a state's counters and the numbers in a line of metrics.jsonl."""
        self._state, self._step = dict(state), step

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics with the last stored values."""
        for name in self.NAMES:
            family = GaugeMetricFamily(f"tether_run_{name}", f"{name} of the run, from the ledger")
            if isinstance(value := self._state.get(name), (int, float)):
                family.add_metric([], value)
            yield family
        for name, meaning in self.ENGINE.items():
            family = GaugeMetricFamily(f"tether_engine_{name}", meaning, labels=["engine"])
            # a restarted worker has the name of its predecessor, which may still be listed
            values = {engine["name"]: engine.get(name) for engine in self._state.get("engines", ())}
            for engine, value in values.items():
                if value is not None:
                    family.add_metric([engine], value)
            yield family
        steps = GaugeMetricFamily("tether_step", "Numbers of the newest step, by field", labels=["field"])
        for field, number in numbers_of(self._step):
            steps.add_metric([field], number)
        yield steps


def main() -> None:
    """Run `python -m services.monitor`."""
    service_main(Role.MONITOR, serve)

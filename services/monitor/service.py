"""Runs `python -m services.monitor`: a read-only web page and metrics of a run.

Consumes: the ledger's status and registry, and metrics.jsonl. Changes nothing.
"""

import asyncio
import json
import logging
from importlib import resources

from aiohttp import web
from prometheus_client import Gauge

from protocol.topics import Role
from services.observability.http import HttpServer
from services.observability.status import collect_status
from services.observability.steps import read_steps
from services.runtime.main import service_main
from services.runtime.process import Process

log = logging.getLogger("tether.monitor")

REFRESH_S = 1.0
"""Seconds between two reads of the ledger."""
SHOWN_STEPS = 2000
"""Newest steps that the page shows."""


async def serve(process: Process) -> None:
    """Serve the page until the process is stopped."""
    settings = process.settings
    page = resources.files("services.monitor").joinpath("page.html").read_text()
    snapshot: dict[str, object] = {}
    gauges = {
        name: Gauge(
            f"tether_run_{name}", f"{name} of the run, from the ledger", registry=process.metrics.registry
        )
        for name in ("version", "issued", "trained", "dropped", "active", "wasted_tokens")
    }

    async def serve_page(_: web.Request) -> web.Response:
        return web.Response(text=page, content_type="text/html")

    async def serve_status(_: web.Request) -> web.Response:
        return web.json_response(snapshot)

    async def serve_steps(request: web.Request) -> web.Response:
        steps = await asyncio.to_thread(read_steps, settings.run_dir / "metrics.jsonl")
        return web.json_response(steps[-SHOWN_STEPS:], dumps=lambda value: json.dumps(value))

    server = HttpServer(
        process.metrics.registry,
        lambda: {"ok": True, "run": process.run},
        {"/": serve_page, "/status.json": serve_status, "/steps.json": serve_steps},
    )
    port = await server.start(settings.monitor.host, settings.monitor.port)
    process.info["page"] = f"http://{settings.monitor.host}:{port}/"
    await process.register()
    log.info("monitor.serving url=%s", process.info["page"])
    try:
        while not await process.stopped_within(REFRESH_S):
            snapshot.update(await collect_status(process.ledger))
            for name, gauge in gauges.items():
                gauge.set(float(snapshot[name]))  # type: ignore[arg-type]
    finally:
        await server.close()


def main() -> None:
    """Run `python -m services.monitor`."""
    service_main(Role.MONITOR, serve)

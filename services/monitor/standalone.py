"""`tether monitor D`: serves the page of a run from its directory and, if it answers, its ledger."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from protocol.errors import TetherError
from services.monitor.access import guard, page_url
from services.monitor.pages import Pages
from services.monitor.run_state import LiveState
from services.monitor.service import REFRESH_S, RunGauges
from services.observability.http import HttpServer
from services.run_record.end import recorded_state
from services.run_record.page_key import access_key
from services.runtime.event_loop import running_loops, stop_at_signals
from services.runtime.run_ledger import open_ledger
from services.settings.sections import Settings

RETRY_S = 10.0
"""Seconds between attempts to connect to a ledger that does not answer."""


class StandaloneMonitor:
    """Monitor outside of the run: it does not register, and needs only files."""

    def __init__(self, settings: Settings, other: Path | None = None) -> None:
        """Store the arguments. With `settings.ledger.retry_s` = 0 it does not wait for an absent ledger.

        `other` is the directory of a second run for comparison.
        """
        self._settings = settings
        self._live: dict[str, Any] = {}
        """Last answer of the ledger; empty while the ledger does not answer."""
        self._pages = Pages(settings, self._describe, other)
        self._registry = CollectorRegistry()
        self._gauges = RunGauges(self._registry)

    async def run(self, stop: asyncio.Event, announce: Callable[[str], None]) -> None:
        """Serve the page until `stop` is set; `announce` gets its URL when it can be opened.

        Raises:
            SettingsError: the address cannot be bound, or the required key cannot be read or created.
        """
        config = self._settings.monitor
        key = access_key(config.host, config.key_file, self._settings.run_dir)
        server = HttpServer(
            self._registry,
            lambda: {"ok": True, "run": self._settings.run.name},
            self._pages.routes(),
            [guard(key)],
        )
        port = await server.start(config.host, config.port)
        announce(page_url(config.host, port, key))
        try:
            loops = {"monitor.read": self._pages.read_loop(REFRESH_S), "monitor.ledger": self._ledger_loop()}
            async with running_loops(loops):
                await stop.wait()
        finally:
            await server.close()

    async def _ledger_loop(self) -> None:
        """Update the state from the ledger; retry a ledger that does not answer, until cancelled."""
        while True:
            with contextlib.suppress(TetherError):
                async with open_ledger(self._settings) as ledger:
                    live = LiveState(ledger, self._settings)
                    while True:
                        self._live = await live.collect()
                        self._gauges.set(self._live, self._pages.history.last)
                        await asyncio.sleep(REFRESH_S)
            self._live = {}
            await asyncio.sleep(RETRY_S)

    def _describe(self) -> dict[str, Any]:
        return self._live or recorded_state(self._settings, self._pages.history.last, self._pages.tail)


async def _run_until_signal(settings: Settings, other: Path | None) -> None:
    stop = asyncio.Event()
    stop_at_signals(stop)
    await StandaloneMonitor(settings, other).run(stop, _announce)


def _announce(url: str) -> None:
    print(f"page {url}  (Ctrl-C ends it)", flush=True)


def run_monitor(
    settings: Settings, host: str | None = None, port: int | None = None, other: Path | None = None
) -> None:
    """Serve the page of a run until Ctrl-C or SIGTERM.

    Args:
        settings: settings of the run's last start.
        host: address to serve on; None: loopback. `monitor.host` applies only to the run's own monitor.
        port: port to serve on; None or 0: any free port.
        other: directory of a second run, shown in all charts for comparison.

    Raises:
        SettingsError: the address cannot be bound, or the required key cannot be read or created.
    """
    monitor = dataclasses.replace(settings.monitor, host=host or "127.0.0.1", port=port or 0)
    asyncio.run(_run_until_signal(dataclasses.replace(settings, monitor=monitor), other))

"""Attacks on every port of a run in progress: the run continues."""

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import pytest

from protocol.topics import Role
from services import monitor
from services.ledger.verify.verifier import verify
from services.runtime.process import Process, open_process
from tests.integration.loop import LiveRun, running, settings_for
from tests.security.attack import Attack, crowd, garbage, messages

DEADLINE_S = 800.0
ROUNDS = 2


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_run_continues_whatever_comes_to_its_ports(tmp_path: Path) -> None:
    settings = settings_for(
        tmp_path / "run",
        "stragglers.toml",
        "run.steps=100000",
        "engine.straggler_share=0.0",
        "trainer.step_s=0.01",
    )
    async with asyncio.timeout(DEADLINE_S), running(settings) as live, watched(live) as page:
        await until(lambda: version_above(live, 1))
        ports = {**bus_ports(live), **http_ports([*everyone(live), page])}
        assert len(ports) >= 3 + 5
        everywhere = [(url.hostname or "", url.port or 0) for url in ports.values()]
        bus = [(url.hostname or "", url.port or 0) for name, url in ports.items() if name.startswith("bus")]
        kinds = ((garbage, everywhere), (crowd, everywhere), (messages, bus))
        attacks = [Attack(targets, settings.run.name, what) for what, targets in kinds]
        threads = [attack.start(seed) for seed, attack in enumerate(attacks)]
        try:
            before = (await live.ledger.status()).version
            await until(lambda: ready(all(attack.failed or attack.rounds >= ROUNDS for attack in attacks)))
            await until(lambda: version_above(live, before + 2))
            pages = {
                name: await asyncio.to_thread(fetch, url.geturl())
                for name, url in ports.items()
                if name.startswith("http")
            }
        finally:
            for attack in attacks:
                attack.stop.set()
            for thread in threads:
                await asyncio.to_thread(thread.join)
        assert [attack.failed for attack in attacks if attack.failed] == []
        assert all(pages.values())
        await until(lambda: version_above(live, before + 4))
    metrics = "\n".join(pages.values())
    for topic in ("rollouts", "scored", "weights"):
        counted = re.findall(
            rf'tether_bus_{topic}_total{{what="(?:malformed|unknown_peer)"}} ([\d.e+]+)', metrics
        )
        assert sum(map(float, counted)) > 0, topic
    result = verify(settings.run_dir / "audit.jsonl")
    assert result.ok, result.violations[:5]
    assert result.steps >= before + 4


def everyone(live: LiveRun) -> list[Process]:
    return [process for processes in live.processes.values() for process in processes]


def bus_ports(live: LiveRun) -> dict[str, SplitResult]:
    """Return every bound socket of the bus."""
    return {
        f"bus {topic}": urlsplit(endpoint)
        for p in everyone(live)
        for topic, endpoint in p.info.get("endpoints", {}).items()
    }


def http_ports(processes: Sequence[Process]) -> dict[str, SplitResult]:
    """Return the ports of health and metrics of every process, and of the monitor's page."""
    pages = {f"http page {p.incarnation}": urlsplit(p.info["page"]) for p in processes if "page" in p.info}
    own = {
        f"http {p.incarnation}": urlsplit(f"http://{p.settings.bus.host}:{p.info['http']}/metrics")
        for p in processes
    }
    return pages | own


@asynccontextmanager
async def watched(live: LiveRun) -> AsyncIterator[Process]:
    """Run the monitor of a run."""
    async with open_process(Role.MONITOR, live.settings, "monitor") as process, asyncio.TaskGroup() as tasks:
        tasks.create_task(monitor.serve(process), name="monitor")
        await until(lambda: ready("page" in process.info))
        yield process
        process.stop.set()


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Poll a condition; the test's own deadline bounds it."""
    while not await holds():  # noqa: ASYNC110 - the condition spans processes
        await asyncio.sleep(0.05)


async def ready(value: bool) -> bool:
    return value


async def version_above(live: LiveRun, version: int) -> bool:
    return (await live.ledger.status()).version > version


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())

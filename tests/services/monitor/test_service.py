"""The monitor waits for its run; unmeasured Prometheus metrics have no sample; docs/metrics.md lists them."""

import asyncio
import re
from pathlib import Path

import aiohttp
import redis.asyncio
from prometheus_client import CollectorRegistry

from protocol.messages import Mismatch, StepReport
from protocol.topics import Role
from services.ledger.embedded_server import EmbeddedServer
from services.monitor.service import RunGauges, serve
from services.observability.metrics import Metrics
from services.runtime.process import open_process
from services.runtime.run_ledger import open_ledger
from tests.contracts.ledger_rig import spec
from tests.integration.loop import ROOT, settings_for

DOCUMENT = (ROOT / "docs/metrics.md").read_text()


def documented(section: str) -> list[str]:
    """The names in the first column of the tables of a section of docs/metrics.md."""
    text = DOCUMENT.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `(\w+)`", text, flags=re.MULTILINE)


def test_every_field_is_documented() -> None:
    assert documented("Fields of metrics.jsonl") == list(StepReport.__struct_fields__)
    assert documented("Mismatch at each lag") == list(Mismatch.__struct_fields__)


def test_every_prometheus_metric_is_documented() -> None:
    metrics, registry = Metrics("trainer"), CollectorRegistry()
    RunGauges(registry)
    known = {family.name for source in (metrics.registry, registry) for family in source.collect()}
    assert set(documented("Prometheus")) == known


def test_unmeasured_metric_has_no_sample() -> None:
    registry = CollectorRegistry()
    gauges = RunGauges(registry)

    def shown(field: str) -> float | None:
        return registry.get_sample_value("tether_step", {"field": field})

    assert registry.get_sample_value("tether_run_version") is None
    gauges.set({"version": 3}, {"entropy": 0.5, "dropped_by_reason": {"stale": 2}})
    assert registry.get_sample_value("tether_run_version") == 3
    assert (shown("entropy"), shown("loss"), shown("dropped_for_stale")) == (0.5, None, 2)
    gauges.set({"version": 4}, {"entropy": None, "loss": 0.1})
    assert (shown("entropy"), shown("loss"), shown("dropped_for_stale")) == (None, 0.1, None)


def test_each_engine_has_its_own_samples() -> None:
    registry = CollectorRegistry()
    engines = [
        {"engine": "rollout.0.a", "name": "rollout.0", "running": 3, "kv_use": 0.5, "prefix_hits": 0.75},
        {"engine": "rollout.1.b", "name": "rollout.1", "running": 0, "kv_use": None, "prefix_hits": None},
    ]
    RunGauges(registry).set({"engines": engines}, {})
    assert [
        registry.get_sample_value(f"tether_engine_{name}", {"engine": engine["name"]})
        for engine in engines
        for name in RunGauges.ENGINE
    ] == [3, 0.5, 0.75, None, 0, None, None, None]


async def test_the_page_waits_for_a_run_that_the_ledger_does_not_have_yet_or_any_more(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "ledger")
    url = await server.start()
    settings = settings_for(tmp_path, "stragglers.toml")
    try:
        async with (
            asyncio.timeout(60),
            redis.asyncio.Redis.from_url(url) as client,
            open_ledger(settings) as ledger,
            open_process(Role.MONITOR, settings, "monitor") as process,
            asyncio.TaskGroup() as tasks,
            aiohttp.ClientSession() as session,
        ):

            async def asked(times: int) -> None:
                """Wait until the monitor has asked so often; nobody else runs scripts meanwhile."""
                before = await scripts()
                while await scripts() < before + times:  # noqa: ASYNC110 (the server is asked)
                    await asyncio.sleep(0.05)

            async def scripts() -> int:
                return int((await client.info("commandstats")).get("cmdstat_evalsha", {}).get("calls", 0))

            async def shows(steps: int) -> None:
                while True:
                    async with session.get(f"{process.info['page']}status.json") as answer:
                        if (await answer.json()).get("steps") == steps:
                            return
                    await asyncio.sleep(0.05)

            serving = tasks.create_task(serve(process))
            await asked(2)
            for steps in (5, 6):
                await ledger.create(spec(settings.run.name, steps=steps))
                await shows(steps)
                await client.flushall()
                await asked(2)
            assert not serving.done()
            await ledger.create(spec(settings.run.name))  # it ends at once where it need not wait
            process.stop.set()
    finally:
        await server.stop()

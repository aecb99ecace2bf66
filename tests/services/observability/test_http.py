"""Tests /health and /metrics of a service, over a real port."""

import asyncio
from collections.abc import AsyncIterator, Mapping

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from protocol.errors import SettingsError
from protocol.topics import Role
from services.observability.http import HttpServer
from services.observability.metrics import Metrics
from services.runtime.process import Process
from services.settings.sections import Settings
from tests.contracts.memory_ledger.ledger import MemoryLedger


class Served:
    """A server, and what it says about its health."""

    def __init__(self) -> None:
        self.metrics = Metrics("reward")
        self.facts: Mapping[str, object] = {"ok": True, "role": "reward"}
        self.port = 0

    async def get(self, path: str) -> tuple[int, str]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{self.port}{path}") as answer,
        ):
            return answer.status, await answer.text()

    async def samples(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """(name, label values) -> value, as Prometheus reads it."""
        status, text = await self.get("/metrics")
        assert status == 200
        return samples_of(text)


def samples_of(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    families = text_string_to_metric_families(text)
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    server = HttpServer(served.metrics.registry, lambda: served.facts)
    served.port = await server.start("127.0.0.1", 0)
    yield served
    await server.close()


async def test_health_tells_the_facts(served: Served) -> None:
    assert await served.get("/health") == (200, '{"ok": true, "role": "reward"}')


async def test_health_of_a_stopping_service_is_503(served: Served) -> None:
    served.facts = {"ok": False}
    assert (await served.get("/health"))[0] == 503


async def test_metrics_are_what_was_counted(served: Served) -> None:
    served.metrics.count("accepted", 3)
    served.metrics.busy.set(5)
    served.metrics.seconds.labels("score").observe(0.02)
    samples = await served.samples()
    assert samples["tether_events_total", ("accepted",)] == 3
    assert samples["tether_in_flight", ()] == 5
    assert samples["tether_work_seconds_count", ("score",)] == 1
    assert samples["tether_work_seconds_bucket", ("score", "0.03")] == 1
    assert samples["tether_work_seconds_bucket", ("score", "0.01")] == 0


async def test_a_watched_dictionary_is_read_when_it_is_asked_for(served: Served) -> None:
    stats = {"sent": 1}
    served.metrics.watch("tether_bus_scored", "Bus counters", lambda: stats)
    stats["sent"] = 4
    stats["resent"] = 2
    samples = await served.samples()
    assert samples["tether_bus_scored_total", ("sent",)] == 4
    assert samples["tether_bus_scored_total", ("resent",)] == 2


async def test_waits_are_shown_while_they_last(served: Served) -> None:
    process = Process(Role.REWARD, Settings(), MemoryLedger(), "reward.0")  # type: ignore[arg-type]
    process.metrics = served.metrics
    with (
        process.waiting("ingest for group 7"),
        process.waiting("ingest for group 8"),
        process.waiting("weights"),
    ):
        await process.register()
        waits = {labels for name, labels in await served.samples() if name == "tether_waiting_seconds"}
    assert waits == {("ingest for group N",), ("weights",)}
    await process.register()
    assert not [name for name, _ in await served.samples() if name == "tether_waiting_seconds"]


async def test_a_wait_lasts_until_the_last_of_those_that_wait_for_the_same_ends() -> None:
    process = Process(Role.INGEST, Settings(), MemoryLedger(), "ingest.0")  # type: ignore[arg-type]
    with process.waiting("spool") as set_detail:
        with process.waiting("spool"):
            assert process.waits == ["spool"]
        assert process.waits == ["spool"]
        with process.waiting("spool"):
            set_detail("disk full")
            assert process.waits == ["spool: disk full", "spool"]
    assert process.waits == []


async def test_a_path_that_nobody_serves_is_404(served: Served) -> None:
    assert (await served.get("/nothing"))[0] == 404


async def test_a_taken_port_is_named(served: Served) -> None:
    second = HttpServer(served.metrics.registry, dict)
    with pytest.raises(SettingsError, match=f"127.0.0.1:{served.port}.*choose another port"):
        await second.start("127.0.0.1", served.port)


async def test_other_names_of_loopback_are_refused(served: Served) -> None:
    url = f"http://127.0.0.1:{served.port}/health"
    async with aiohttp.ClientSession() as session:
        for host, status in (("evil.example", 403), ("localhost:80", 200), ("[::1]", 200)):
            async with session.get(url, headers={"Host": host}) as answer:
                assert answer.status == status


async def test_slow_heads_and_too_many_connections_are_closed(served: Served) -> None:
    server = HttpServer(served.metrics.registry, dict, max_connections=2, header_s=0.2)
    port = await server.start("127.0.0.1", 0)
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    for _, writer in opened:
        writer.write(b"GET /health HTTP/1.1\r\n")
    async with asyncio.timeout(60):
        answers = [await reader.read() for reader, _ in opened]
    assert answers[:2] == [b"", b""]
    assert answers[2].startswith(b"HTTP/1.1 503 ")
    for _, writer in opened:
        writer.close()
    await server.close()


async def test_requests_that_are_no_http_leave_no_lines(caplog: pytest.LogCaptureFixture) -> None:
    server = HttpServer(Metrics("reward").registry, lambda: {})
    port = await server.start("127.0.0.1", 0)
    for noise in (b"\x00\xff junk\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(noise)
        async with asyncio.timeout(60):
            assert (await reader.read(64)).startswith(b"HTTP/1.0 400")
        writer.close()
    await server.close()
    assert caplog.records == []


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_an_address_of_ipv6_serves_with_and_without_brackets(host: str) -> None:
    server = HttpServer(Metrics("reward").registry, lambda: {"ok": True})
    port = await server.start(host, 0)
    async with aiohttp.ClientSession() as session, session.get(f"http://[::1]:{port}/health") as answer:
        assert answer.status == 200
    await server.close()

"""Many workers and two trainers at once on a real server, each on connections of its own; the server is
killed among them. Which call comes first is up to the server; whichever it is, the log must prove the run."""

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import redis as redis_sync

from protocol.errors import Reason, Refused
from protocol.staleness import Policy, trainable_counts
from services.ledger.embedded_server import EmbeddedServer
from services.ledger.interface import Lease
from services.ledger.redis.ledger import RedisLedger
from tests.contracts.ledger_rig import new_run, spec
from tests.services.ledger.verify.logs import verify_events

WORKERS = 12
MINUTE_MS = 60_000


class Crowd:
    """What the tasks share: the run, and the leases that anybody may meddle with."""

    def __init__(self, url: str, run: str, policy: Policy, steps: int, seed: int) -> None:
        self.url, self.run, self.steps = url, run, steps
        self.spec = spec(run, E=1, B=3, policy=policy, steps=steps, max_attempts=50, drop_window=10_000)
        self.random = random.Random(seed)
        self.leases: list[Lease] = []
        self.epochs = 0
        self.over = False
        self.versions = [asyncio.Event() for _ in range(steps + 1)]
        """Set once that version is committed."""

    async def ledger(self) -> RedisLedger:
        return await RedisLedger.connect(self.url, self.run, timeout_s=30, retry_s=60)

    async def worker(self, name: str) -> None:
        ledger, number = await self.ledger(), 0
        while not self.over:
            number += 1
            try:
                head = await ledger.status()
                await ledger.applied(name, head.epoch, max(0, head.version - self.random.randrange(2)))
                lease = await ledger.lease(
                    request=f"{name}-{number}", engine=name, holder=name, lease_ms=MINUTE_MS
                )
                self.leases.append(lease)
                await self.finish(
                    ledger,
                    lease if self.random.random() < 0.7 else self.random.choice(self.leases[-20:]),
                    head.version,
                )
            except Refused:
                await asyncio.sleep(0.002)
        await ledger.close()

    async def finish(self, ledger: RedisLedger, lease: Lease, version: int) -> None:
        """Do something with a lease, perhaps with one that is not one's own any more. `version`: one that is
        committed."""
        group, token = lease.group, lease.token
        kind = self.random.random()
        if kind < 0.05:
            return  # forgotten: it expires
        if kind < 0.1:
            await ledger.release(group, token, "tired")
        elif kind < 0.15:
            await ledger.drop(group, token, "filter")
        else:
            await ledger.extend(group, token, MINUTE_MS)
            for _ in range(self.random.choice((1, 1, 2))):
                await ledger.accept(group, token, {lease.version: 5, max(lease.version, version): 3})
            if kind > 0.97:
                await ledger.lost(group, token)

    async def trainer(self) -> None:
        """Claims the run whenever it has lost it, and steps until somebody else claims it."""
        ledger = await self.ledger()
        while not self.over:
            self.epochs += 1
            epoch = f"e{self.epochs}"
            try:
                version = (await ledger.claim(epoch)).version
                await ledger.resume(epoch, version, version)
                await self.steps_of(ledger, epoch)
            except Refused as refusal:
                self.over = refusal.reason is Reason.DONE
            await asyncio.sleep(0.1 * self.random.random())
        await ledger.close()

    async def steps_of(self, ledger: RedisLedger, epoch: str) -> None:
        while self.random.random() < 0.97:
            try:
                taken = await ledger.take(epoch)
            except Refused as refusal:
                if refusal.reason not in (Reason.NOT_ENOUGH, Reason.STRAGGLER):
                    raise
                await asyncio.sleep(0.002)
                continue
            trained = {
                group.group: trainable_counts(taken.step, group.counts, group.max_staleness)
                for group in taken.groups
            }
            version = await ledger.commit(
                epoch, taken.step, trained, digest=taken.step + 1, report=b"", manifest=b""
            )
            self.versions[version].set()
            if version % 7 == 0:
                await ledger.checkpointed(version)

    async def meddler(self) -> None:
        """Lets leases run out, and changes the bound."""
        ledger = await self.ledger()
        client = redis_sync.Redis.from_url(self.url)
        pick = self.random.choice
        while not self.over:
            try:
                due = client.zrange(ledger.keys.of("leases"), 0, 0)
                if due and pick((True, False)):
                    client.zadd(ledger.keys.of("leases"), {due[0]: 0}, xx=True)
                if pick((True, False, False, False)):
                    await ledger.set_bound(
                        max_staleness=pick((0, 1, 2)),
                        groups_per_step=pick((2, 3, 4)),
                        policy=pick((None, *Policy)),
                    )
            except redis_sync.ConnectionError:
                pass  # the server is away
            await asyncio.sleep(0.01)
        client.close()
        await ledger.close()

    async def go(self) -> Any:
        """Let everybody loose until the run is over; returns what the log proves."""
        ledger = await self.ledger()
        await ledger.create(self.spec)
        async with asyncio.TaskGroup() as tasks:
            for number in range(WORKERS):
                tasks.create_task(self.worker(f"w{number}"), name=f"worker {number}")
            for _ in range(2):
                tasks.create_task(self.trainer(), name="trainer")
            tasks.create_task(self.meddler(), name="meddler")
        status = await ledger.status()
        result = verify_events(await ledger.events(0, 1_000_000))
        await ledger.close()
        assert result.violations == []
        assert (result.steps, status.version) == (self.steps, self.steps)
        assert (result.issued, result.trained, result.dropped) == (
            status.issued,
            status.trained,
            status.dropped,
        )
        return result


@pytest.mark.parametrize("policy", list(Policy))
async def test_calls_that_race_leave_a_log_that_proves_the_run(valkey_url: str, policy: Policy) -> None:
    async with asyncio.timeout(800):
        await Crowd(valkey_url, new_run(), policy, steps=25, seed=1).go()


async def test_calls_that_race_while_the_server_is_killed_are_lost_or_made_once(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    crowd = Crowd(await server.start(), new_run(), Policy.DROP, steps=30, seed=2)

    async def kill() -> None:
        """Kill the server twice, at arbitrary moments."""
        nonlocal server
        for reached in (8, 16):
            await crowd.versions[reached].wait()
            os.kill(server.pid, signal.SIGKILL)
            while server.running():
                os.sched_yield()
            server = EmbeddedServer(tmp_path)
            assert await server.start() == crowd.url

    async with asyncio.timeout(800), asyncio.TaskGroup() as tasks:
        tasks.create_task(kill(), name="kill")
        await crowd.go()
    await server.stop()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
async def test_many_races_leave_a_log_that_proves_the_run(redis_url: str, seed: int) -> None:
    async with asyncio.timeout(1800):
        await Crowd(redis_url, new_run(), list(Policy)[seed % 3], steps=200, seed=seed).go()

"""Measures CPU of the ledger's server per kind of call, at three sizes of the run.

The sizes are 10, 1,000 and 10,000 processes, engines and active groups. A call that is frequent must not cost
more with their number; one per step, or made by people, may.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from protocol.errors import Refused
from protocol.ids import new_token
from protocol.staleness import Bound, Policy
from protocol.topics import Role
from services.ledger.event_log.archiver import Archiver
from services.ledger.interface import Peer, RunSpec
from services.ledger.redis.ledger import RedisLedger

EPOCH = "epoch-1"
BATCH = 32
INFO = {
    "name": "rollout.0",
    "pid": 1,
    "host": "host-1",
    "started": 1.7e9,
    "http": 40000,
    "engine": "scripted",
    "version": 3,
    "busy_s": 1.0,
}
INFO["waits"] = {"a lease: bound": 0.1} | {f"acknowledgement of group {group}": 0.2 for group in range(8)}
Call = Callable[[int], Awaitable[object]]


def server_cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, to the nanosecond."""
    return (
        sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
    )


class Crowd:
    """A run with `size` registered processes, engines and leased groups."""

    def __init__(self, ledger: RedisLedger, pid: int, size: int) -> None:
        self._ledger, self._pid, self._size = ledger, pid, size
        self._tokens: dict[int, str] = {}

    async def gather(self) -> None:
        """Create the run and register everybody; rule F has room for exactly these leases."""
        ledger, size = self._ledger, self._size
        bound = Bound(0, size, Policy.MASK)
        await ledger.create(
            RunSpec(run=ledger.run, fingerprint="costs", prompts=None, steps=1 << 30, bound=bound)
        )
        await ledger.claim(EPOCH)
        await ledger.resume(EPOCH, 0, 1)
        await self.many(size, self._register)
        await self.many(size, lambda index: ledger.applied(f"engine.{index}", EPOCH, 0))
        await self.many(size, self._lease)

    async def many(self, count: int, call: Call) -> None:
        """Make `count` calls, some at a time."""
        indices = iter(range(count))

        async def work() -> None:
            for index in indices:
                await call(index)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(BATCH):
                tasks.create_task(work())

    async def micros(self, count: int, call: Call) -> float:
        """Return microseconds of the server's CPU for one call."""
        await self.many(BATCH, call)
        before = server_cpu_s(self._pid)
        await self.many(count, call)
        return (server_cpu_s(self._pid) - before) / count * 1e6

    async def measure(self, count: int) -> dict[str, float]:
        """Return microseconds for each kind of call; `count` of the cheap ones."""
        ledger, size = self._ledger, self._size
        few = max(20, min(count, 200_000 // size))
        found = {
            "register": await self.micros(count, self._register),
            "endpoints": await self.micros(count, lambda _: ledger.endpoints("rollouts")),
            "head": await self.micros(count, lambda _: ledger.head()),
            "manifest": await self.micros(count, lambda _: ledger.manifest()),
            "lease refused": await self.micros(count, self._refused),
            "extend": await self.micros(
                count, lambda index: ledger.extend(index % size, self._tokens[index % size], 600_000)
            ),
            "status": await self.micros(few, lambda _: ledger.status()),
            "peers": await self.micros(few, lambda _: ledger.peers()),
        }
        before = time.process_time()
        await ledger.peers()
        found["list a process, client"] = (time.process_time() - before) / size * 1e6
        before = server_cpu_s(self._pid)
        await self.many(size, lambda group: ledger.accept(group, self._tokens[group], {0: 1024}))
        found["accept"] = (server_cpu_s(self._pid) - before) / size * 1e6
        before = server_cpu_s(self._pid)
        taken = await ledger.take(EPOCH)
        found["take, per group"] = (server_cpu_s(self._pid) - before) / size * 1e6
        before = server_cpu_s(self._pid)
        trained = {group.group: dict(group.counts) for group in taken.groups}
        await ledger.commit(EPOCH, 0, trained, digest=1, report=bytes(600), manifest=bytes(4096))
        found["commit, per group"] = (server_cpu_s(self._pid) - before) / size * 1e6
        before = server_cpu_s(self._pid)
        await self.many(size, lambda index: ledger.applied(f"engine.{index}", EPOCH, 1))
        found["applied"] = (server_cpu_s(self._pid) - before) / size * 1e6
        before = server_cpu_s(self._pid)
        await self.many(size, self._lease)
        found["lease"] = (server_cpu_s(self._pid) - before) / size * 1e6
        with tempfile.TemporaryDirectory(prefix="tether-costs-") as directory:
            last = (await ledger.head()).sequence
            before = time.process_time()
            await Archiver(ledger, Path(directory)).archive_all()
            found["archive an event, client"] = (time.process_time() - before) / last * 1e6
        return found

    async def _register(self, index: int) -> None:
        info = INFO | (
            {"endpoints": {"rollouts": f"tcp://127.0.0.1:{index}"}}
            if index % self._size < max(1, self._size // 25)
            else {}
        )
        await self._ledger.register(
            Peer(Role.ROLLOUT, f"rollout.{index % self._size}.0a1b2c3d", info), 3_600_000
        )

    async def _lease(self, index: int) -> None:
        engine = f"engine.{index % self._size}"
        lease = await self._ledger.lease(request=new_token(), engine=engine, holder=engine, lease_ms=600_000)
        self._tokens[lease.group] = lease.token

    async def _refused(self, index: int) -> None:
        try:
            await self._lease(index)
        except Refused:
            return
        raise AssertionError("there should be no room")


async def measure_ledger(
    url: str, pid: int, sizes: tuple[int, ...], count: int
) -> dict[int, dict[str, float]]:
    """Return microseconds of the server for each kind of call, by size of the crowd."""
    found = {}
    for size, number in zip(sizes, itertools.count()):
        ledger = await RedisLedger.connect(url, f"costs-{number}", archive_limit=1 << 40, timeout_s=60.0)
        try:
            crowd = Crowd(ledger, pid, size)
            await crowd.gather()
            found[size] = {name: round(value, 2) for name, value in (await crowd.measure(count)).items()}
        finally:
            await ledger.close()
    return found

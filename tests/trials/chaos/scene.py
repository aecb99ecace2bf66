"""Runs `tether up` with a Redis of its own and a proxy on every link; restarts both when they are killed."""

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from protocol.errors import SettingsError, Unavailable
from protocol.host.prctl import die_with_parent
from services.ledger.embedded_server import EmbeddedServer, find_server
from services.ledger.redis.ledger import RedisLedger
from tests.integration.command import environment, service_of
from tests.integration.loop import ROOT
from tests.trials.chaos.place import Place
from tests.trials.chaos.proxy import Proxy, Weather
from tests.trials.chaos.schedule import LINKS
from tests.warm import popen

POLL_S = 0.1
PR_SET_CHILD_SUBREAPER = 36
START_UP = "import sys; sys.executable = sys.argv.pop(1); from services.cli import main; main()"
"""`tether`, with its services started by another interpreter: one that gives each of them a clock."""


class Scene:
    """A run in progress."""

    def __init__(
        self, place: Place, seed: int, overrides: Sequence[str] = (), *, is_forked: bool = False
    ) -> None:
        """Begin without processes; if `is_forked`, services start in a moment, and have no clock to set."""
        self.place, self.overrides, self.is_forked = place, overrides, is_forked
        self.run = f"chaos-{seed}-{os.getpid()}"
        self.links = {name: Weather(random.Random(f"{seed} {name}")) for name in LINKS}
        self.host = "127.{}.{}.{}".format(*(random.randrange(1, 255) for _ in range(3)))
        """Loopback address of this run's proxies; the services themselves listen at 127.0.0.1, on the same
        ports."""
        self.redis = EmbeddedServer(
            place.root / "redis", str(place.with_clock("redis-server", find_server(), "redis"))
        )
        self.redis_held = 0
        """How many faults keep Redis from being started again."""
        self.up: asyncio.subprocess.Process | None = None
        self.up_held = 0
        self.up_starts = 0
        self._up_settled = False
        self._proxies: dict[str, Proxy] = {}
        self._python = place.with_clock("python", sys.executable, "$TETHER_INSTANCE")
        self._url = ""

    def pid(self, target: str) -> int | None:
        """Return the pid of a service, of `redis`, of `up`, or of a `scorer`; None while it does not run.

        A scorer is a worker process of a reward service.
        """
        if target == "redis":
            return self.redis.pid if self.redis.running() else None
        if self.up is None or self.up.returncode is not None:
            return None
        if target == "up":
            return self.up.pid
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.up.pid).children(recursive=target == "scorer"):
                with contextlib.suppress(psutil.Error):
                    if target == "scorer" and "reward.workers.worker" in child.cmdline():
                        return int(child.pid)
                    if service_of(child.pid) == target:
                        return int(child.pid)
        return None

    async def start(self) -> RedisLedger:
        """Start Redis and its proxy; returns a ledger that uses no proxy."""
        adopt_orphans()
        url = urlsplit(await self.redis.start())
        proxy = self._proxies[self.redis.url] = Proxy(self.links["ledger"], ("127.0.0.1", url.port or 0))
        if self.is_forked:
            await asyncio.to_thread(popen.start_server, environment(**self.place.variables()))
        self._url = url._replace(
            netloc=f":{url.password}@{self.host}:{await proxy.start(self.host)}"
        ).geturl()
        return await RedisLedger.connect(self.redis.url, self.run, timeout_s=5, retry_s=60)

    async def stop(self) -> None:
        """Stop the proxies and Redis."""
        for proxy in self._proxies.values():
            proxy.close()
        popen.end_server()
        await self.redis.stop()

    async def keep_redis_loop(self) -> None:
        """Start Redis again when it has died, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            if not self.redis.running() and not self.redis_held:
                with contextlib.suppress(
                    Unavailable, SettingsError, OSError
                ):  # its disk is full, or it was killed again
                    await self.redis.start()

    async def proxy_loop(self, ledger: RedisLedger) -> None:
        """Put a proxy before every endpoint that a service registers, until cancelled."""
        while True:
            with contextlib.suppress(Unavailable):
                for peer in await ledger.peers():
                    for topic, endpoint in peer.info.get("endpoints", {}).items():
                        if endpoint not in self._proxies:
                            port = int(endpoint.rpartition(":")[2])
                            self._proxies[endpoint] = Proxy(self.links[topic], ("127.0.0.1", port))
                            await self._proxies[endpoint].start(self.host, port)
            self._up_settled = self._up_settled or self.pid("trainer") is not None
            await asyncio.sleep(POLL_S)

    async def keep_up(self) -> int:
        """Run `tether up`, again if it was killed or found no ledger at its start; returns its exit code."""
        config = Path(__file__).with_name("run.toml")
        words = ["up", str(config), "--run-dir", str(self.place.run_dir), "--set", f"run.name={self.run}"]
        for override in (f"bus.advertise={self.host}", *self.overrides):
            words += ["--set", override]
        program = ("-m", "services.cli") if self.is_forked else ("-c", START_UP, str(self._python))
        while True:
            self.up_starts += 1
            self._up_settled = False
            with (self.place.root / "up.log").open("ab") as out, popen.forking(self.is_forked):
                self.up = await asyncio.create_subprocess_exec(
                    sys.executable, *program, *words, cwd=ROOT, stdout=out, stderr=out,
                    env=environment(**self.place.variables(), TETHER_REDIS_URL=self._url),
                    preexec_fn=die_with_parent,
                )  # fmt: skip
            code = await self.up.wait()
            if code != -signal.SIGKILL and (code != 2 or self._up_settled):
                return code
            while self.up_held:  # noqa: ASYNC110 (a plain counter)
                await asyncio.sleep(POLL_S)


def adopt_orphans() -> None:
    """Make orphaned processes of a run children of this process."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


@asynccontextmanager
async def started(
    place: Place, seed: int, overrides: Sequence[str] = (), *, is_forked: bool = False
) -> AsyncIterator[tuple[Scene, RedisLedger, "asyncio.Task[int]"]]:
    """Start a run; yields it, a ledger, and the task that returns the exit code of `tether up`."""
    scene = Scene(place, seed, overrides, is_forked=is_forked)
    ledger = await scene.start()
    try:
        async with asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(scene.keep_redis_loop()), tasks.create_task(scene.proxy_loop(ledger))]
            up = tasks.create_task(scene.keep_up())
            try:
                yield scene, ledger, up
            finally:
                for task in (*loops, up):
                    task.cancel()
                if scene.up is not None and scene.up.returncode is None:
                    scene.up.kill()
    finally:
        await ledger.close()
        await scene.stop()

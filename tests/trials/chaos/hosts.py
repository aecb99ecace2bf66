"""Runs the loop on several hosts, network namespaces on a bridge, and cuts links between them.

    python -m tests.trials.chaos.hosts

    ledger   10.99.0.2   Redis, ingest, trainer
    east     10.99.0.3   a rollout and a reward worker
    west     10.99.0.4   a rollout and a reward worker

Services are started one by one, use CURVE, and get their weights over the network. Exit codes: 0 success, 1 a
violation, 77 this machine permits no network namespaces. Everything runs in a namespace of this program and
ends with it.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from protocol.host.prctl import die_with_parent
from services.bus.curve import create_keys
from services.ledger.embedded_server import find_server
from services.ledger.redis.ledger import RedisLedger
from tests.integration.command import environment
from tests.integration.loop import ROOT
from tests.trials.chaos.checks import check_leftovers, check_run
from tests.trials.chaos.place import PRIVATE, Place, enter_private, make_place
from tests.trials.chaos.run import tell_last_step
from tests.trials.chaos.scene import POLL_S, adopt_orphans

NOT_PERMITTED = 77
RUN = "chaos-hosts"
BRIDGE = "10.99.0.1"
HOSTS = {"ledger": "10.99.0.2", "east": "10.99.0.3", "west": "10.99.0.4"}
SERVICES = (
    ("ledger", "ingest"),
    ("east", "reward"),
    ("west", "reward"),
    ("ledger", "trainer"),
    ("east", "rollout"),
    ("west", "rollout"),
)
CUT_S = 8.0
"""Longer than a lease and than the bus waits for a silent peer."""
LIMIT_S = 900.0


def ip(*words: str) -> None:
    """Run one `ip` command.

    Raises:
        subprocess.CalledProcessError: if it is not permitted.
    """
    subprocess.run(["ip", *words], check=True, capture_output=True)


def make_network(hosts: Mapping[str, str] = HOSTS) -> None:
    """Make hosts, name -> address, on a bridge, and connect this program to it."""
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)  # `ip netns` keeps its names there
    ip("link", "add", "bridge", "type", "bridge")
    ip("address", "add", f"{BRIDGE}/24", "dev", "bridge")
    for device in ("lo", "bridge"):
        ip("link", "set", device, "up")
    for host, address in hosts.items():
        ip("netns", "add", host)
        ip("link", "add", host, "type", "veth", "peer", "name", "eth0", "netns", host)
        ip("link", "set", host, "master", "bridge", "up")
        ip("-n", host, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", host, "link", "set", device, "up")


@asynccontextmanager
async def cut(host: str) -> AsyncIterator[None]:
    """Drop all packets from and to a host, without notifying either end."""
    ip("link", "set", host, "down")
    try:
        yield
    finally:
        ip("link", "set", host, "up")


class Hosts:
    """The processes of the run, on their hosts."""

    def __init__(
        self,
        place: Place,
        addresses: Mapping[str, str] = HOSTS,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start nothing yet; the first host of `addresses` has Redis."""
        self.place = place
        self.addresses = addresses
        self.variables = variables or {}
        self.ledger = next(iter(addresses))
        self.password = secrets.token_hex(16)
        self.url = f"redis://:{self.password}@{addresses[self.ledger]}:6379/0"
        self.processes: dict[tuple[str, str], asyncio.subprocess.Process] = {}

    async def start(self, host: str, name: str, *program: str) -> asyncio.subprocess.Process:
        """Start a program on a host; it ends with this one."""
        variables = {
            "TETHER_CONFIG": str(Path(__file__).with_name("run.toml")), "TETHER_RUN": RUN,
            "TETHER_RUN_DIR": str(self.place.run_dir),
            "TETHER_REDIS_URL": self.url, "TETHER_INSTANCE": f"{name}.{host}",
            "TETHER_BUS__HOST": self.addresses[host],
            "TETHER_BUS__CURVE_DIR": str(self.place.root / "keys"), "TETHER_WEIGHTS__TRANSPORT": "nccl",
            "TETHER_WEIGHTS__HOST": self.addresses[host], "GLOO_SOCKET_IFNAME": "eth0",
            **self.variables,
        }  # fmt: skip
        with (self.place.root / f"{name}.{host}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                "ip", "netns", "exec", host, *program,
                cwd=ROOT if name != "redis" else self.place.root / "redis", stdout=log, stderr=log,
                env=environment(**self.place.variables(), **variables), preexec_fn=die_with_parent,
            )  # fmt: skip
        self.processes[host, name] = process
        return process

    async def service(self, host: str, name: str) -> asyncio.subprocess.Process:
        """Start a service."""
        return await self.start(host, name, sys.executable, "-m", f"services.{name}")

    async def redis(self) -> None:
        """Start Redis on the ledger's host."""
        config = self.place.root / "redis" / "server.conf"
        config.write_text(
            f"bind {self.addresses[self.ledger]}\nport 6379\nrequirepass {self.password}\n"
            'appendonly yes\nappendfsync always\nsave ""\n'
        )
        await self.start(self.ledger, "redis", find_server(), str(config))

    async def stop(self, *names: str) -> list[str]:
        """Ask services to drain; returns those that did not end well."""
        wrong = []
        for (host, name), process in self.processes.items():
            if name in names:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                if await process.wait() != 0:
                    wrong.append(f"{name} on {host} ended with exit code {process.returncode}")
        return wrong


async def run(place: Place) -> list[str]:
    """Run the whole scenario; returns violations."""
    adopt_orphans()
    create_keys(place.root / "keys")
    hosts = Hosts(place)
    await hosts.redis()
    ledger = await connected(hosts.url)
    if await (await hosts.service("ledger", "prepare")).wait() != 0:
        return ["prepare failed"]
    for host, name in SERVICES:
        await hosts.service(host, name)
    await reached(ledger, 2)
    print("all hosts work", flush=True)
    async with cut("west"):
        await asyncio.sleep(CUT_S)
        await reached(ledger, (await ledger.status()).version + 2)
    print("made steps without west", flush=True)
    await serves(ledger, "rollout.west")
    print("west has come back", flush=True)
    async with cut("ledger"):
        await asyncio.sleep(CUT_S)
    for engine in ("rollout.east", "rollout.west"):
        await serves(ledger, engine)
    last = await tell_last_step(ledger, place)
    print(f"the ledger has come back; the last step is {last}", flush=True)
    wrong = (
        [f"the trainer ended with exit code {code}"]
        if (code := await hosts.processes["ledger", "trainer"].wait())
        else []
    )
    wrong += await hosts.stop("rollout") + await hosts.stop("reward") + await hosts.stop("ingest")
    status = await ledger.status()
    await ledger.close()
    await hosts.stop("redis")
    report = await asyncio.to_thread(check_run, place.run_dir, status)
    print(
        f"hosts={len(HOSTS)} steps={report.steps} groups={report.groups} trained={report.trained} "
        f"dropped={report.dropped}",
        flush=True,
    )
    return wrong + report.violations + check_leftovers(place.root, place.run_dir, [])


async def connected(url: str) -> RedisLedger:
    """Return a ledger, once its server is up."""
    while True:
        with contextlib.suppress(Exception):
            return await RedisLedger.connect(url, RUN, timeout_s=5, retry_s=60)
        await asyncio.sleep(POLL_S)


async def reached(ledger: RedisLedger, version: int) -> None:
    """Wait until the run has reached a version."""
    while True:
        if (await ledger.status()).version >= version:
            return
        await asyncio.sleep(POLL_S)


async def serves(ledger: RedisLedger, name: str) -> None:
    """Wait until an engine serves the current version."""
    while True:
        engines, status = (
            {peer.incarnation for peer in await ledger.peers("rollout") if peer.info["name"] == name},
            await ledger.status(),
        )
        if any(status.engines.get(engine, ("", -1))[1] >= status.version for engine in engines):
            return
        await asyncio.sleep(POLL_S)


async def within_limit(scenario: Callable[[Place], Awaitable[list[str]]], place: Place) -> list[str]:
    async with asyncio.timeout(LIMIT_S):
        return await scenario(place)


def main(
    scenario: Callable[[Place], Awaitable[list[str]]] = run, addresses: Mapping[str, str] = HOSTS
) -> int:
    """Make the network, run a scenario on its hosts, and print the violations."""
    enter_private("net")
    if PRIVATE not in os.environ:
        return NOT_PERMITTED
    try:
        make_network(addresses)
    except (subprocess.CalledProcessError, FileNotFoundError):
        return NOT_PERMITTED
    with tempfile.TemporaryDirectory(prefix="tether-chaos-") as root:
        place = make_place(Path(root) / "place")
        try:
            wrong = asyncio.run(within_limit(scenario, place))
        except BaseException:
            for log in sorted(place.root.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}", flush=True)
            raise
        finally:
            place.close()
    for violation in wrong:
        print(f"violation: {violation}")
    print(f"violations={len(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs the soak: hundreds of workers against one ingest and one trainer for minutes, watched from outside.

    python -m tests.trials.soak.run --minutes 15 --rollouts 200 --rewards 8 --out runs/soak.json

Also writes the tables, runs/soak.md. The embedded ledger, the ingest and the (scripted) trainer are the real
processes; the workers are tasks of the real services in at most 4 processes (`fleet.py`). The last line is
JSON with `ok`; exit code 1 if it is false.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import Any

from protocol.host.prctl import tied_to_this_process
from services.ledger.embedded_server import EmbeddedServer
from services.ledger.event_log.archiver import FILE, Archiver
from services.ledger.redis.ledger import RedisLedger
from services.ledger.verify.verifier import verify
from services.prepare import prepare
from services.runtime.run_ledger import open_ledger
from services.settings.load import dump_settings
from services.settings.sections import Settings
from tests.integration.loop import ROOT, settings_for
from tests.trials.soak.costs import measured_costs
from tests.trials.soak.probe import Probe
from tests.trials.soak.report import report
from tests.trials.soak.table import render

SAMPLE_S = 5.0
START_S = 600.0
DRAIN_S = 90.0
FLEETS = 4
LOAD = (
    "run.name=soak", "run.steps=1000000000", "bound.max_staleness=4", "bound.groups_per_step=64",
    "sampling.samples_per_prompt=2",
    "sampling.max_tokens=8", "engine.seconds_per_token=0.2", "engine.straggler_share=0.02",
    "engine.straggler_factor=10.0",
    "trainer.step_s=1.2", "trainer.checkpoint_every=10", "rollout.groups_in_flight=2", "reward.workers=1",
    "monitor.enabled=false",
    "bound.drop_window=4096", "ledger.ttl_s=15",
)  # fmt: skip
"""Overrides of the settings.

The trainer is the slowest part, so that rule F is at its limit and leases are refused, as in a real run. A
machine that stalls for seconds makes dozens of groups stale: the window of drops is large enough that this
does not halt the run.
"""

ALLOCATOR = {"MALLOC_ARENA_MAX": "2"}
"""Limits the allocator's arenas: a fleet has hundreds of ZeroMQ threads, and each arena keeps its maximum."""


class Soak:
    """One run: its processes and their samples."""

    def __init__(self, settings: Settings, ledger: RedisLedger, server: EmbeddedServer) -> None:
        self.settings, self._ledger, self._server = settings, ledger, server
        self.processes: dict[str, Popen[bytes]] = {}
        self.samples: list[dict[str, Any]] = []
        self.io_cpu_s: list[dict[str, float]] = []
        self.group_bytes: list[tuple[int, int]] = []
        """(bytes of the keys that hold groups, groups in them), now and then."""

    def start(self, name: str, *arguments: str) -> None:
        """Start a process of the run; its log is RUN_DIR/logs/NAME.log."""
        run = {
            "TETHER_CONFIG": str(self.settings.run_dir / "settings.json"),
            "TETHER_REDIS_URL": self._server.url,
            "TETHER_INSTANCE": name,
        }
        with (self.settings.run_dir / "logs" / f"{name}.log").open("wb") as log:
            self.processes[name] = Popen(
                [sys.executable, "-m", *arguments], cwd=ROOT, env={**os.environ, **ALLOCATOR, **run},
                stdin=DEVNULL, stdout=log,
                stderr=STDOUT, start_new_session=True, preexec_fn=tied_to_this_process(),
            )  # fmt: skip

    def alive(self) -> None:
        """Raise RuntimeError if a process has ended."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                tail = (self.settings.run_dir / "logs" / f"{name}.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{name} ended with {process.returncode}: {tail}")

    async def until_up(self, rollouts: int) -> None:
        """Wait until all engines have weights and the first steps are made."""
        async with asyncio.timeout(START_S):
            while True:
                status = await self._ledger.status()
                if len(status.engines) >= rollouts and status.version >= 3:
                    return
                self.alive()
                await asyncio.sleep(0.5)

    async def watch(self, seconds: float) -> None:
        """Sample for so many seconds."""
        pids = {"ledger": self._server.pid} | {name: process.pid for name, process in self.processes.items()}
        probe = Probe(pids, self._server.url, self.settings.run.name, self.settings.run_dir)
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                self.alive()
                sample = await asyncio.to_thread(probe.sample)
                self.samples.append(sample)
                if len(self.samples) % 6 == 1:
                    self.io_cpu_s.append({"time": time.time(), **await asyncio.to_thread(probe.io_cpu_s)})
                    self.group_bytes.append(
                        (await asyncio.to_thread(probe.group_bytes), sample["sizes"].get("groups", 0))
                    )
                    _say(sample)
                await asyncio.sleep(max(0.0, min(SAMPLE_S, end - time.monotonic())))
        finally:
            probe.close()

    async def drain(self) -> None:
        """Stop leasing; wait until the trainer has trained the rest, then stop the others in order."""
        await self._ledger.drain()
        await self._ended("trainer")
        for names in (self._fleets(), ["ingest"]):
            for name in names:
                self.processes[name].send_signal(signal.SIGTERM)
            for name in names:
                await self._ended(name)

    async def _ended(self, name: str) -> None:
        code = await asyncio.to_thread(self.processes[name].wait, DRAIN_S)
        if code:
            raise RuntimeError(f"{name} ended with {code} when it was to drain")

    def end(self) -> None:
        """End the processes that still run, with their children."""
        for process in self.processes.values():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            finally:
                process.wait(10)

    def _fleets(self) -> list[str]:
        return [name for name in self.processes if name.startswith("fleet")]


def _say(sample: Mapping[str, Any]) -> None:
    rss = " ".join(f"{name} {size / 1e6:.0f}" for name, size in sample["rss"].items())
    print(
        f"soak: version {sample['version']} issued {sample['issued']} trained {sample['trained']} MB: {rss}",
        file=sys.stderr,
        flush=True,
    )


@asynccontextmanager
async def soaking(settings: Settings, rollouts: int, rewards: int) -> AsyncIterator[Soak]:
    """Start all processes of a run, wait until they work, and end them with the block."""
    (settings.run_dir / "logs").mkdir(parents=True)
    spec = await asyncio.to_thread(prepare, settings)
    server = EmbeddedServer(settings.run_dir / "ledger")
    await server.start()
    try:
        dump_settings(settings, settings.run_dir / "settings.json")
        async with open_ledger(
            dataclasses.replace(settings, ledger=dataclasses.replace(settings.ledger, url=server.url))
        ) as ledger:
            await ledger.create(spec)
            soak = Soak(settings, ledger, server)
            try:
                soak.start("ingest", "services.ingest")
                soak.start("trainer", "services.trainer")
                fleets = min(FLEETS, rollouts)
                for index in range(fleets):
                    soak.start(
                        f"fleet{index}", "tests.trials.soak.fleet", f"fleet{index}",
                        str(len(range(index, rollouts, fleets))), str(len(range(index, rewards, fleets))),
                    )  # fmt: skip
                await soak.until_up(rollouts)
                yield soak
                await Archiver(ledger, settings.run_dir).archive_all()
            finally:
                await asyncio.to_thread(soak.end)
    finally:
        await server.stop()


async def run(
    directory: Path, minutes: float, rollouts: int, rewards: int, overrides: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Run a whole soak; returns the report."""
    settings = settings_for(directory / "run", "stragglers.toml", *LOAD, *overrides)
    async with soaking(settings, rollouts, rewards) as soak:
        await soak.watch(60 * minutes)
        await soak.drain()
        status = await soak._ledger.status()
    audit = settings.run_dir / FILE
    return report(soak.samples, soak.io_cpu_s, soak.group_bytes, status, verify(audit), audit) | {
        "rollouts": rollouts,
        "rewards": rewards,
    }


def main() -> None:
    """Run the soak, write the JSON, print its last line."""
    parser = argparse.ArgumentParser(
        description="Many workers against one ingest and one trainer, for minutes."
    )
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--rewards", type=int, default=8)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/soak.json")
    parser.add_argument(
        "--no-costs", action="store_true", help="leave out the costs of each call and the projection"
    )
    parser.add_argument("--keep", type=Path, help="leave the run in this directory")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="a setting")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    with tempfile.TemporaryDirectory(prefix="tether-soak-") as scratch:
        try:
            found = asyncio.run(
                run(
                    arguments.keep or Path(scratch),
                    arguments.minutes,
                    arguments.rollouts,
                    arguments.rewards,
                    tuple(arguments.set),
                )
            )
        except (Exception, BaseExceptionGroup) as error:
            print(json.dumps({"ok": False, "failures": [f"{type(error).__name__}: {error}"]}))
            raise
    if not arguments.no_costs:
        found["costs"] = measured_costs(found)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=2) + "\n")
    table = render(found)
    arguments.out.with_suffix(".md").write_text(table)
    print(table)
    print(json.dumps({name: value for name, value in found.items() if name not in ("samples", "costs")}))
    sys.exit(0 if found["ok"] else 1)


if __name__ == "__main__":
    main()

"""Makes one run by `tether up` and kills its processes, one at a time, each during a transfer of weights."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from protocol.errors import TetherError
from protocol.host.prctl import die_with_parent
from services.ledger.embedded_server import EmbeddedServer
from services.ledger.interface import LedgerStatus
from services.ledger.redis.ledger import RedisLedger
from services.run_record.lines import LineFollower
from services.settings.load import load_settings
from services.settings.sections import Settings
from tests.integration.command import environment
from tests.integration.loop import ROOT
from tests.trials.chaos.checks import check_leftovers, check_run
from tests.trials.chaos.faults import send
from tests.trials.chaos.gpu_kills.layouts import Layout, Moment, Target
from tests.trials.chaos.gpu_kills.moments import (
    Event,
    Kill,
    fate,
    median_ms,
    recovery,
    state_at,
    torn,
    transfers_ms,
)
from tests.trials.chaos.gpu_kills.processes import find_process
from tests.trials.chaos.gpu_kills.witness import now_ms, witnessing
from tests.trials.chaos.place import Place
from tests.trials.chaos.run import tell_last_step
from tests.trials.chaos.scene import POLL_S

CONFIG = Path(__file__).with_name("run.toml")
DEFAULTS = {
    "NCCL_NVLS_ENABLE": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""Environment of a run, where the caller's says nothing."""
FIRST_VERSIONS = 4
"""Versions that are served before the first kill, to know how long a transfer takes."""
SHARE = 0.4
"""Share of the quickest transfer's time that passes before the kill."""
END_S = 60.0
"""Limit of the last steps and the end of the run, seconds."""
ALIKE = re.compile(r"(psm|sem\.mp|vllm|torch|torchelastic)_|nccl-|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
"""Names of files that libraries leave in /dev/shm and TMPDIR when they are killed: noted, and no violation.
The last ones are vLLM's sockets."""

Say = Callable[[str], None]
Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take, seconds."""

    start_s: float
    """Until the first versions are served."""
    kill_s: float
    """From a kill until all work again."""
    until: float
    """When, by `time.monotonic`, no further kill is begun."""


class Stuck(Exception):
    """Raised if the run does not do what is waited for."""


class Scenario:
    """One run of a layout: its processes, its witness, and the log as far as it was read."""

    def __init__(self, layout: Layout, place: Place, limits: Limits, say: Say, save: Save) -> None:
        """Start nothing yet.

        Args:
            layout: what runs where, and what is killed.
            place: an empty directory.
            limits: how long things may take.
            say: prints a line.
            save: is given what was found so far, after each kill.
        """
        self.layout, self.place, self.limits, self.say, self.save = layout, place, limits, say, save
        self.found: dict[str, Any] = {
            "layout": layout.name, "about": layout.about, "kills": [], "violations": [],
        }  # fmt: skip
        self._run = f"kills-{layout.name.lower()}-{os.getpid()}"
        self._shared = shared_memory()
        self._log = LineFollower(place.run_dir / "audit.jsonl")
        self._events: list[Event] = []

    async def run(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Make the run with its kills, and check what it left; returns all that was found."""
        server = EmbeddedServer(self.place.root / "redis")
        await server.start()
        status = None
        try:
            self._ledger = await RedisLedger.connect(server.url, self._run, timeout_s=5, retry_s=20)
            try:
                async with tether_up(
                    self.place, server.url, (f"run.name={self._run}", *overrides)
                ) as self._up:
                    await self._kill_and_end()
                with contextlib.suppress(TetherError):
                    status = await self._ledger.status()
            finally:
                await self._ledger.close()
        finally:
            await server.stop()
        if self._up.returncode != 0:
            self._wrong(f"`tether up` ended with exit code {self._up.returncode}: {self._last_line()}")
        await asyncio.to_thread(self._check, status)
        return self.found

    async def _kill_and_end(self) -> None:
        """Kill one process after the other, then let the run end."""
        began = time.monotonic()
        try:
            settings = await self._settings()
        except Stuck as stuck:
            return self._wrong(str(stuck))
        async with witnessing(self._ledger, self._run, settings.bus) as self._witness:
            try:
                await self._until(self._has_served, self.limits.start_s, "the first versions")
                self.found["start_s"] = round(time.monotonic() - began, 1)
                usual = {str(moment): median_ms(self._transfers_ms(moment)) for moment in Moment}
                self.found["usual_ms"] = usual
                self.say(
                    f"{FIRST_VERSIONS} versions after {self.found['start_s']} s; on the way for {usual} ms"
                )
                for target, moment in self.layout.kills:
                    self.found["kills"].append(await self._row(target, moment, settings))
                    self.save(self.found)
                await self._end()
            except (Stuck, TetherError, OSError) as error:
                self._wrong(str(error))

    async def _row(self, target: Target, moment: Moment, settings: Settings) -> dict[str, Any]:
        """Return what a kill led to, or why there was none."""
        row: dict[str, Any] = {"target": target.label, "moment": str(moment)}
        why = target.missing_in(settings)
        if not why and time.monotonic() > self.limits.until:
            why = "no time was left"
        if why:
            return row | {"not_run": why}
        try:
            return row | await self._kill(target, moment, settings.parallel.world_size)
        except Stuck as stuck:
            self._wrong(f"{target.label}: {stuck}")
            return row | {"problem": str(stuck)}

    async def _kill(self, target: Target, moment: Moment, ranks: int) -> dict[str, Any]:
        """Kill a process during a transfer and wait until all work again; returns what was seen.

        Raises:
            Stuck: nothing was killed.
        """
        limit_s = self.limits.kill_s

        def process() -> psutil.Process | None:
            return find_process(self._up.pid, target, ranks)

        await self._until(lambda: process() is not None, limit_s, "the process that is to be killed")
        victim = process()
        if victim is None:
            raise Stuck("the process that was to be killed ended by itself")
        kill = await self._kill_at(victim, target, moment)
        after_ms = kill.at_ms - kill.heard.at_ms
        version = kill.heard.version
        self.say(f"killed {target.label} {after_ms:.1f} ms after the {moment} of version {version}")
        row: dict[str, Any] = {
            "version": version, "killed_after_ms": round(after_ms, 2),
            "groups_in_flight": (await self._ledger.status()).active,
        }  # fmt: skip
        try:
            await self._until(lambda: process() not in (None, victim), limit_s, "the process after it")
            row["process_s"] = round((now_ms() - kill.at_ms) / 1e3, 2)
            await self._until(
                lambda: recovery(kill, self._read()).working_s is not None, limit_s, "a step after the kill"
            )
        except Stuck as stuck:
            row["problem"] = str(stuck)
            self._wrong(f"{target.label}: {stuck}")
        events = self._read()
        return row | asdict(recovery(kill, events)) | {
            "in_flight": state_at(kill, events, self._witness.staged), "fate": fate(kill, events),
        }  # fmt: skip

    async def _kill_at(self, victim: psutil.Process, target: Target, moment: Moment) -> Kill:
        """Kill a process when a part of the time has passed that the quickest transfer took."""
        quickest = min((ms for ms in self._transfers_ms(moment) if ms > 0), default=0.0)
        newest = max((told.version for told in self._witness.announced), default=0)
        limit_s = self.limits.kill_s
        try:
            async with asyncio.timeout(limit_s):
                told = await self._witness.announcement(
                    lambda told: told.moment is moment and told.version > newest
                )
        except TimeoutError:
            raise Stuck(f"no {moment} of a version was heard within {limit_s:.0f} s") from None
        await asyncio.sleep(max(0.0, SHARE * quickest - (now_ms() - told.at_ms)) / 1e3)
        at_ms = now_ms()
        send(victim.pid, signal.SIGKILL)
        return Kill(target, at_ms, told)

    async def _end(self) -> None:
        """Let the run make its last steps and end, and compare what engines had with what was committed."""
        await tell_last_step(self._ledger, self.place)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._up.wait()
        self.found["violations"] += torn(self._witness.staged, self._read())
        self.found["copies"] = len(self._witness.staged)
        self.found["failed_updates"] = self._witness.failed

    def _check(self, status: LedgerStatus | None) -> None:
        """Check what the run left."""
        new = sorted(shared_memory() - self._shared)
        tmp = self.place.root / "tmp"
        in_tmp = [path.name for path in tmp.iterdir() if ALIKE.match(path.name)]
        for name in in_tmp:
            shutil.rmtree(tmp / name) if (tmp / name).is_dir() else (tmp / name).unlink()
        self.found["left_by_libraries"] = [name for name in new if ALIKE.match(name)] + in_tmp
        ours = [Path("/dev/shm") / name for name in new if self._run in name]
        self.found["violations"] += check_leftovers(self.place.root, self.place.run_dir, ours)
        if status is None:
            return self._wrong("the ledger does not answer")
        try:
            report = check_run(self.place.run_dir, status)
        except (OSError, ValueError, KeyError) as error:
            return self._wrong(f"the run cannot be checked: {error!r}")
        self.found["violations"] += report.violations
        self.found |= {name: getattr(report, name) for name in ("steps", "groups", "trained", "dropped")}

    async def _until(self, ready: Callable[[], bool], limit_s: float, what: str) -> None:
        """Wait until `ready`.

        Raises:
            Stuck: it did not come in time, or the run ended.
        """
        end = time.monotonic() + limit_s
        while not ready():
            if self._up.returncode is not None:
                raise Stuck(f"`tether up` ended before {what} came: {self._last_line()}")
            if time.monotonic() > end:
                raise Stuck(f"{what} did not come within {limit_s:.0f} s")
            await asyncio.sleep(POLL_S)

    async def _settings(self) -> Settings:
        """Wait for the run's settings, with what was chosen for this machine."""
        path = self.place.run_dir / "settings.json"
        await self._until(path.exists, self.limits.start_s, "the run's settings")
        return await asyncio.to_thread(load_settings, str(path), environ={})

    def _read(self) -> list[Event]:
        """Return the event log as far as it is archived."""
        more = True
        while more:
            lines, more = self._log.read()
            self._events += [json.loads(line.data) for line in lines]
        return self._events

    def _has_served(self) -> bool:
        return sum(event["event"] == "applied" for event in self._read()) >= FIRST_VERSIONS

    def _transfers_ms(self, moment: Moment) -> list[float]:
        """Return how long versions were on their way after this moment."""
        heard = self._witness
        return transfers_ms(moment, heard.announced, heard.staged, self._read())

    def _last_line(self) -> str:
        lines = (self.place.root / "up.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def _wrong(self, what: str) -> None:
        self.found["violations"].append(what)
        self.say(what)


@asynccontextmanager
async def tether_up(
    place: Place, url: str, overrides: Sequence[str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`tether up` within the block; a run that has not ended by then is ended."""
    command = [sys.executable, "-m", "services.cli", "up", str(CONFIG), "--run-dir", str(place.run_dir)]
    command += [word for override in overrides for word in ("--set", override)]
    variables = {name: os.environ.get(name, text) for name, text in DEFAULTS.items()} | {
        "TMPDIR": str(place.root / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": str(place.root / "inductor"),
        "TETHER_REDIS_URL": url,
    }
    with (place.root / "up.log").open("wb") as out:
        up = await asyncio.create_subprocess_exec(
            *command,
            cwd=ROOT,
            stdout=out,
            stderr=out,
            env=environment(**variables),
            preexec_fn=die_with_parent,
        )
    try:
        yield up
    finally:
        for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # the second one kills its services
            if up.returncode is None:
                send(up.pid, signum)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(15):
                        await up.wait()


def shared_memory() -> set[str]:
    """Return the names of the files in /dev/shm."""
    return set(os.listdir("/dev/shm"))

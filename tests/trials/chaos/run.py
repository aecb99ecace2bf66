"""Runs a run under the faults of a seed, and checks what must hold after it.

    python -m tests.trials.chaos.run --seed 1 --minutes 2 [--scripted] [--sessions] [--forked] [--keep]

Prints each fault as it happens; the last line counts faults, groups and violations. The exit code is 1 if
there are violations: what the run left is then kept in runs/, as it is with --keep. The same seed gives the
same faults at the same moments, so a failing one can be run again.
"""

import argparse
import asyncio
import contextlib
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from protocol.errors import Refused, TetherError
from services.ledger.interface import LedgerStatus
from services.ledger.redis.ledger import RedisLedger
from services.prepare import prepare
from services.settings.load import load_settings
from tests.integration.loop import ROOT
from tests.trials.chaos.checks import Report, check_leftovers, check_run
from tests.trials.chaos.faults import FAULTS, Missed
from tests.trials.chaos.place import Place, enter_private, make_place
from tests.trials.chaos.scene import POLL_S, Scene, started
from tests.trials.chaos.schedule import Fault, schedule

FIRST_STEP_S = 600.0
LAST_STEPS = 5
LAST_STEPS_S = 600.0
"""How long the run may take for its last steps and its end, once all faults are repaired."""


SCRIPTED = (
    "engine.name=scripted", "engine.seconds_per_token=0.02", "trainer.backend=scripted", "trainer.step_s=0.1",
)  # fmt: skip
"""Settings of a run without a model, which leaves most of the processor to the faults."""

SESSIONS = (
    "environment.name=agent", 'environment.options={function="tests.integration.long_episode:solve"}',
    "engine.max_model_len=256", "model.scratch.max_position_embeddings=256", "sampling.max_tokens=2",
    "bound.groups_per_step=4", "rollout.groups_in_flight=8",
)  # fmt: skip
"""Settings of a run whose samples are sessions of 20 calls."""


class Chaos:
    """One run and its faults."""

    def __init__(
        self,
        place: Place,
        seed: int,
        faults: list[Fault],
        overrides: Sequence[str] = (),
        *,
        is_forked: bool = False,
    ) -> None:
        """Begin before the run; if `is_forked`, its services start in a moment, and have no clock to set.

        Raises:
            ValueError: the faults set the clock of such a service.
        """
        if is_forked and any(fault.kind == "skew" and fault.target != "redis" for fault in faults):
            raise ValueError(
                f"seed {seed} sets the clock of a service, which no fork has: leave out --forked"
            )
        self.place, self.seed, self.faults, self.overrides = place, seed, faults, overrides
        self.is_forked = is_forked
        self.done: Counter[str] = Counter()
        self.missed = 0
        self.shared: set[Path] = set()
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} {text}", flush=True)

    async def run(self) -> Report:
        """Start the run, inject the faults, let it make its last steps, and check what it left."""
        self.shared = shared_memory()
        begun = started(self.place, self.seed, self.overrides, is_forked=self.is_forked)
        async with begun as (scene, ledger, up):
            async with asyncio.timeout(FIRST_STEP_S):
                await reached(ledger, 1, up)
            self._began = time.monotonic()
            self.say(f"{scene.run} has made its first step; {len(self.faults)} faults follow")
            failure = await self._do_all(scene, up)
            if not failure:
                failure = await self._finish(scene, ledger, up)
            status = await ledger.status()
        report = await asyncio.to_thread(self._check, scene, status)
        report.violations[:0] = failure
        return report

    async def _do_all(self, scene: Scene, up: "asyncio.Task[int]") -> list[str]:
        """Inject all faults, each at its moment."""
        async with asyncio.TaskGroup() as tasks:
            doing = [tasks.create_task(self._do(scene, fault)) for fault in self.faults]
            waiting = set(doing)
            while waiting and not up.done():
                waiting -= (await asyncio.wait({*waiting, up}, return_when=asyncio.FIRST_COMPLETED))[0]
            for task in waiting:
                task.cancel()
        return [ended_early(up, self.place)] if up.done() else []

    async def _do(self, scene: Scene, fault: Fault) -> None:
        await asyncio.sleep(self._began + fault.at_s - time.monotonic())
        what = f"{fault.kind} {fault.target} for {fault.lasts_s} s"
        try:
            async with FAULTS[fault.kind](scene, fault.target, random.Random(f"{self.seed} {fault.at_s}")):
                self.done[fault.kind] += 1
                self.say(what)
                await asyncio.sleep(fault.lasts_s)
        except Missed as missed:
            self.missed += 1
            self.say(f"{what}: {missed}")

    async def _finish(self, scene: Scene, ledger: RedisLedger, up: "asyncio.Task[int]") -> list[str]:
        """Set the last step once no fault is active, and wait until the run has reached it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_STEPS_S):
                while not up.done() and scene.pid("trainer") is None:  # noqa: ASYNC110 (nobody tells of a start)
                    await asyncio.sleep(POLL_S)
                last = await tell_last_step(ledger, self.place)
                self.say(f"all is mended; the last step is {last}")
                await reached(ledger, last, up)
                code = await up
                self.say(f"tether up ended with exit code {code}")
                return [] if code == 0 else [ended_early(up, self.place)]
        status = await ledger.status()
        return [
            f"after all faults had ended, version {status.version} of {status.steps} was reached within "
            f"{LAST_STEPS_S:.0f} s, and no end"
        ]

    def _check(self, scene: Scene, status: LedgerStatus) -> Report:
        report = check_run(self.place.run_dir, status)
        shared = sorted(
            path for path in shared_memory() - self.shared if self.place.mounts or scene.run in path.name
        )
        report.violations += check_leftovers(self.place.root, self.place.run_dir, shared)
        return report


def shared_memory() -> set[Path]:
    """Return the run's shared memory segments, without those that libfaketime leaves behind."""
    return {path for path in Path("/dev/shm").iterdir() if "faketime" not in path.name}


async def reached(ledger: RedisLedger, version: int, up: "asyncio.Task[int]") -> None:
    """Wait for a version, or for the end of `tether up`."""
    while not up.done():
        with contextlib.suppress(TetherError):  # there is no run yet
            if (await ledger.status()).version >= version:
                return
        await asyncio.sleep(POLL_S)


async def tell_last_step(ledger: RedisLedger, place: Place) -> int:
    """Set the run's length to a few steps from now."""
    spec = await asyncio.to_thread(prepare, load_settings(str(place.run_dir / "settings.json"), environ={}))
    while True:
        last = (await ledger.status()).version + LAST_STEPS
        with contextlib.suppress(Refused):  # it has made more in between
            await ledger.create(replace(spec, steps=last))
            return last


def ended_early(up: "asyncio.Task[int]", place: Place) -> str:
    lines = (place.root / "up.log").read_text(errors="replace").splitlines()
    return f"`tether up` ended with exit code {up.result()}: {lines[-1] if lines else ''}"


def keep(place: Place, seed: int) -> Path:
    """Copy what the run left to a directory that stays."""
    target = ROOT / "runs" / f"chaos-{seed}"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(
        place.root,
        target,
        ignore=shutil.ignore_patterns("ballast", "exports", "model"),
        ignore_dangling_symlinks=True,
    )
    return target


def last_line(seed: int, minutes: float, chaos: Chaos, report: Report) -> str:
    """Return the summary of a run."""
    faults = ",".join(f"{kind}:{chaos.done[kind]}" for kind in FAULTS if kind in chaos.place.kinds)
    missing = [kind for kind in FAULTS if kind not in chaos.place.kinds]
    return (
        f"chaos seed={seed} minutes={minutes:g} faults={{{faults}}} missed={chaos.missed} "
        f"not-permitted={','.join(missing) or 'none'} "
        f"steps={report.steps} groups={report.groups} trained={report.trained} dropped={report.dropped} "
        f"violations={len(report.violations)}"
    )


def main(arguments: Iterable[str] | None = None) -> int:
    """Run one seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--scripted", action="store_true", help="engine and trainer without a model")
    parser.add_argument("--sessions", action="store_true", help="samples are sessions of 20 calls")
    parser.add_argument("--forked", action="store_true", help="services are forks, without clocks to set")
    parser.add_argument("--keep", action="store_true", help="keep what the run left in runs/ in any case")
    options = parser.parse_args(arguments)
    enter_private()
    with tempfile.TemporaryDirectory(prefix="tether-chaos-") as root:
        place = make_place(Path(root) / "place")
        try:
            faults = schedule(options.seed, options.minutes, place.kinds)
            overrides = SCRIPTED * options.scripted + SESSIONS * options.sessions
            chaos = Chaos(place, options.seed, faults, overrides, is_forked=options.forked)
            report = asyncio.run(chaos.run())
            for violation in report.violations:
                print(f"violation: {violation}")
            if report.violations or options.keep:
                print(f"kept in {keep(place, options.seed)}")
        finally:
            place.close()
    print(last_line(options.seed, options.minutes, chaos, report), flush=True)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs a configuration while its rollout workers are killed, one after another, and checks what must hold.

    python -m tests.trials.chaos.worker_kills CONFIG [--every 20] [--least 0.8] [--run-dir D] [OPTIONS OF UP]

The first kill comes after the first step. The last line counts kills and violations, and says the reward of
the first and the last five steps. The exit code is 1 if there are violations, or if the latter is below
`--least`.
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from protocol.host.prctl import die_with_parent
from services.run_record.steps import read_steps
from tests.integration.command import audit, environment, service_of
from tests.integration.loop import ROOT
from tests.trials.chaos.checks import living_children, trained_twice
from tests.trials.chaos.faults import send
from tests.trials.chaos.scene import POLL_S, adopt_orphans

ENDS = 5
"""Steps at either end whose mean reward is printed."""


def rollout_workers(up: int) -> dict[str, int]:
    """Return the living rollout workers of a `tether up`: name -> pid."""
    with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
        services = {service_of(child.pid): child.pid for child in psutil.Process(up).children()}
        return {name: pid for name, pid in services.items() if name.startswith("rollout.")}
    return {}


async def killing_loop(up: asyncio.subprocess.Process, run_dir: Path, every_s: float) -> int:
    """Kill a rollout worker every `every_s` seconds, in turn, until `up` has ended; returns how many."""
    while up.returncode is None and not (run_dir / "metrics.jsonl").exists():  # noqa: ASYNC110 (a file)
        await asyncio.sleep(POLL_S)
    began, kills, last = time.monotonic(), 0, ""
    while up.returncode is None:
        if time.monotonic() < began + every_s * (kills + 1):
            await asyncio.sleep(POLL_S)
            continue
        alive = rollout_workers(up.pid)
        names = sorted(alive, key=lambda name: (name <= last, name))
        if not names:
            await asyncio.sleep(POLL_S)
            continue
        last, kills = names[0], kills + 1
        send(alive[last], signal.SIGKILL)
        steps = len(read_steps(run_dir / "metrics.jsonl"))
        print(f"{time.monotonic() - began:7.1f} killed {last} after {steps} steps", flush=True)
    return kills


async def run(config: Path, run_dir: Path, every_s: float, words: Iterable[str]) -> tuple[int, list[str]]:
    """Run a configuration to its end; returns how many workers were killed, and what is wrong."""
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="tether-kills-") as temporary:  # for what the killed leave
        up = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.cli", "up", str(config), "--run-dir", str(run_dir), *words,
            cwd=ROOT, env=environment(TMPDIR=temporary), preexec_fn=die_with_parent,
        )  # fmt: skip
        async with asyncio.TaskGroup() as tasks:
            killing = tasks.create_task(killing_loop(up, run_dir, every_s))
            code = await up.wait()
    wrong = [f"`tether up` ended with exit code {code}"] if code else []
    for child in living_children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it was about to end
            wrong.append(f"process {child.pid} is left: {' '.join(child.cmdline())}")
    return killing.result(), wrong


def check(run_dir: Path) -> list[str]:
    """Return what is wrong with the log of a run."""
    result = audit(run_dir)
    wrong = [f"tether verify: {violation}" for violation in result["violations"]]
    with (run_dir / "audit.jsonl").open() as lines:
        wrong += trained_twice(json.loads(line) for line in lines)
    steps = [step["step"] for step in read_steps(run_dir / "metrics.jsonl")]
    if steps != list(range(result["steps"])):
        wrong.append(f"metrics.jsonl has the steps {steps}, not {result['steps']}")
    return wrong


def main(arguments: Iterable[str] | None = None) -> int:
    """Run, check and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--least", type=float, default=0.8, help="reward that the last steps must have")
    parser.add_argument("--run-dir", type=Path, default=ROOT / "runs/worker-kills", help="is emptied first")
    options, words = parser.parse_known_args(arguments)
    run_dir = options.run_dir.absolute()
    shutil.rmtree(run_dir, ignore_errors=True)
    kills, wrong = asyncio.run(run(options.config, run_dir, options.every, words))
    wrong += check(run_dir)
    rewards = [step["reward_mean"] for step in read_steps(run_dir / "metrics.jsonl")]
    first, last = statistics.fmean(rewards[:ENDS]), statistics.fmean(rewards[-ENDS:])
    if last < options.least:
        wrong.append(f"the reward of the last {ENDS} steps is {last:.3f}, below {options.least:g}")
    for violation in wrong:
        print(f"violation: {violation}")
    print(f"kills={kills} steps={len(rewards)} reward={first:.3f}..{last:.3f} violations={len(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures how much of the time a run trains while its processes are killed.

    python -m tests.benchmarks.faults --out runs/faults.json [--minutes 6] [--every 60,20] [--seed 0]
        [--config deploy/configs/demo.toml] [--set A.B=C ...]

Phases: the load without kills, with a `kill -9` of a random process (a service or the ledger's server) at
each period of `--every`, and without kills once more. Each phase is a run of its own, measured from its third
commit on. A phase's figure is trained tokens a second; its ratio divides that by the mean of both phases
without kills. Every run has to end with exit code 0 at SIGTERM, and `tether verify` has to find nothing.
"""

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from protocol.host.processors import processor_name
from services.observability.steps import read_steps
from tests.benchmarks.run import PACKAGES
from tests.benchmarks.versions import ROOT, versions_of
from tests.integration.command import audit, service_of, tether_up, until

WARM_COMMITS = 3
SETTLE_S = 30.0
"""Seconds after these commits before the window begins, in every phase: spares are started meanwhile."""
START_S = 300.0
STOP_S = 180.0
ALWAYS = ("run.steps=1000000", "eval.at_end=false", "services.rollouts=2")


def main() -> None:
    """Run the phases, print a line for each, write the JSON; exit code 1 if a run ended badly."""
    options = _arguments()
    periods = [0.0, *options.every, 0.0]
    phases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tether-faults-", ignore_cleanup_errors=True) as directory:
        for number, period_s in enumerate(periods):
            rng = random.Random(f"{options.seed} {number}")
            place = Path(directory) / str(number)
            place.mkdir()
            phases.append(_phase(options, place, period_s, rng))
            print(_described(phases[-1]), flush=True)
    undisturbed = statistics.mean(phases[i]["tokens_per_s"] for i in (0, -1))
    for phase in phases:
        phase["ratio"] = round(phase["tokens_per_s"] / undisturbed, 3)
    drift = phases[-1]["tokens_per_s"] / phases[0]["tokens_per_s"]
    facts = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [*sys.orig_argv[1:]],
        "cpu": {"model": processor_name() or platform.processor(), "cores": os.cpu_count()},
        "system": platform.platform(),
        "versions": versions_of(PACKAGES),
        "drift": round(drift, 3),
        "phases": phases,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(facts, indent=2) + "\n")
    for phase in phases:
        print(f"{_title(phase):22} ratio {phase['ratio']:.3f}")
    print(f"second run without kills against the first: {drift:.3f}")
    if any(phase["code"] or phase["violations"] for phase in phases):
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure a run under kills.")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/faults.json")
    parser.add_argument("--minutes", type=float, default=6.0, help="window of each phase")
    parser.add_argument(
        "--every",
        type=lambda text: [float(part) for part in text.split(",")],
        default=[60.0, 20.0],
        help="seconds between kills, a phase for each",
    )
    parser.add_argument("--settle", type=float, default=SETTLE_S, help="seconds before each window")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", default="deploy/configs/demo.toml")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--keep", type=Path, help="directory to copy the runs' logs to")
    return parser.parse_args()


def _phase(options: argparse.Namespace, place: Path, period_s: float, rng: random.Random) -> dict[str, Any]:
    """Run the load for the window, with a kill every `period_s` seconds; 0: none."""
    run_dir, output = place / "run", place / "up.log"
    settings = [word for setting in (*ALWAYS, *options.set) for word in ("--set", setting)]
    kills: list[dict[str, Any]] = []
    with tether_up(options.config, "--run-dir", str(run_dir), *settings, output=output) as up:
        metrics = run_dir / "metrics.jsonl"
        until(lambda: len(read_steps(metrics)) >= WARM_COMMITS, seconds=START_S, what="the first commits")
        time.sleep(options.settle)
        began = time.time()
        end = began + options.minutes * 60
        load = os.getloadavg()[0]
        while (left := end - time.time()) > 0:
            time.sleep(min(left, period_s or left))
            if period_s and time.time() < end - 1:
                kills.append(_kill_one(up.pid, run_dir, rng))
        end = time.time()
        up.send_signal(signal.SIGTERM)
        code = up.wait(STOP_S)
    verified = audit(run_dir)
    if options.keep:
        _keep(place, options.keep / f"{len(list(options.keep.glob('*')))}-{period_s:g}")
    return {
        "period_s": period_s,
        "load_average": round(load, 2),
        "code": code,
        "violations": verified["violations"],
        **_figures(read_steps(metrics), began, end, kills),
    }


def _figures(
    steps: Sequence[dict[str, Any]], began: float, end: float, kills: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return tokens a second within the window, and the longest gap between commits after each kill."""
    inside = [step for step in steps if began <= step["time"] <= end]
    times = [began, *(step["time"] for step in inside), end]
    gaps = list(itertools.pairwise(times))
    for kill, following in itertools.zip_longest(kills, kills[1:]):
        until_s = following["at"] if following else end
        touched = [b - a for a, b in gaps if b > kill["at"] and a < until_s]
        kill["gap_s"] = round(max(touched, default=0.0), 2)
    for kill in kills:
        kill["at"] = round(kill["at"] - began, 1)
    return {
        "seconds": round(end - began, 1),
        "commits": len(inside),
        "trained_tokens": sum(step["trained_tokens"] for step in inside),
        "tokens_per_s": round(sum(step["trained_tokens"] for step in inside) / (end - began), 2),
        "median_gap_s": round(statistics.median(b - a for a, b in gaps), 3),
        "kills": kills,
    }


def _kill_one(up: int, run_dir: Path, rng: random.Random) -> dict[str, Any]:
    """Kill a random service of the run, or the ledger's server, by SIGKILL."""
    found = {name: child.pid for child in psutil.Process(up).children() if (name := service_of(child.pid))}
    found["ledger"] = json.loads((run_dir / "ledger/endpoint.json").read_text())["pid"]
    name = rng.choice(sorted(found))
    at = time.time()
    with contextlib.suppress(ProcessLookupError):  # it is just being started again
        os.kill(found[name], signal.SIGKILL)
    return {"name": name, "at": at}


def _keep(place: Path, directory: Path) -> None:
    shutil.copytree(place / "run/logs", directory / "logs")
    for path in (place / "run/metrics.jsonl", place / "up.log"):
        shutil.copy(path, directory)


def _described(phase: dict[str, Any]) -> str:
    lines = [
        f"{_title(phase)}: {phase['tokens_per_s']:.1f} tokens/s, {phase['commits']} commits in "
        f"{phase['seconds']:.0f} s, median gap {phase['median_gap_s']:.2f} s, exit code {phase['code']}, "
        f"{len(phase['violations'])} violations, load {phase['load_average']}"
    ]
    lines += [
        f"  {kill['at']:6.1f} s  {kill['name']:10} gap {kill['gap_s']:.1f} s" for kill in phase["kills"]
    ]
    return "\n".join(lines)


def _title(phase: dict[str, Any]) -> str:
    return f"a kill every {phase['period_s']:g} s" if phase["period_s"] else "no kills"


if __name__ == "__main__":
    main()

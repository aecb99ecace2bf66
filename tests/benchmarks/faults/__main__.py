"""Measures how much of the time a run trains while its processes are killed.

    python -m tests.benchmarks.faults --out runs/faults.json [--rounds 6] [--window 60] [--every 60,20,10]
        [--seed 0] [--config deploy/configs/demo.toml] [--set A.B=C ...] [--keep DIR]

One run of the load, from a settled start. Windows alternate (tests/benchmarks/faults/windows.py): without
kills, and with a `kill -9` of a random process (a service or the ledger's server) each period of `--every`.
The figure is trained tokens a second over those without kills. The run has to end with exit code 0 at
SIGTERM, and `tether verify` has to find nothing.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from services.run_record.steps import read_steps
from tests.benchmarks.faults.kills import kill_one
from tests.benchmarks.faults.windows import Kill, Window, curve, gaps_by_service, kill_times, measure, plan
from tests.benchmarks.record import record_now
from tests.benchmarks.run import PACKAGES
from tests.benchmarks.versions import ROOT, versions_of
from tests.integration.command import audit, tether_up, until

WARM_COMMITS = 3
SETTLE_S = 45.0
"""Seconds after these commits before the first window: spares are started meanwhile."""
PAUSE_S = 8.0
"""Seconds between two windows, so that a kill late in one costs the next one nothing."""
START_S = 300.0
STOP_S = 180.0
ALWAYS = ("run.steps=1000000", "eval.at_end=false", "services.rollouts=2")


def main() -> None:
    """Run the windows, print a line for each, write the JSON; exit code 1 if the run ended badly."""
    options = _arguments()
    record, loads = record_now(), [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="tether-faults-", ignore_cleanup_errors=True) as directory:
        run_dir, output = Path(directory) / "run", Path(directory) / "up.log"
        settings = [word for setting in (*ALWAYS, *options.set) for word in ("--set", setting)]
        with tether_up(options.config, "--run-dir", str(run_dir), *settings, output=output) as up:
            windows = _windows(options, up.pid, run_dir, loads)
            up.send_signal(signal.SIGTERM)
            code = up.wait(STOP_S)
        verified = audit(run_dir)
        if options.keep:
            _keep(Path(directory), options.keep)
    facts: dict[str, Any] = {
        "record": record,
        "versions": versions_of(PACKAGES),
        "load_average": [round(load, 1) for load in loads],
        "seed": options.seed,
        "code": code,
        "steps": verified["steps"],
        "violations": verified["violations"],
        "curve": curve(windows),
        "services": gaps_by_service(windows),
        "windows": windows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(facts, indent=1) + "\n")
    for row in facts["curve"]:
        print(
            f"{_title(row['period_s']):22} {row['kills']:3} kills  ratio {row['ratio']:.3f} "
            f"(rounds {row['least']:.3f} to {row['most']:.3f}), by gaps {row['by_gaps']:.3f}"
        )
    print(f"exit code {code}, {len(verified['violations'])} violations")
    if code or verified["violations"]:
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure a run under kills.")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/faults.json")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--window", type=float, default=60.0, help="seconds of each window")
    parser.add_argument("--every", type=_periods, default=[60.0, 20.0, 10.0], help="seconds between kills")
    parser.add_argument("--settle", type=float, default=SETTLE_S, help="seconds before the first window")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", default="deploy/configs/demo.toml")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--keep", type=Path, help="directory to copy the run's logs to")
    return parser.parse_args()


def _periods(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _windows(options: argparse.Namespace, up: int, run_dir: Path, loads: list[float]) -> list[dict[str, Any]]:
    metrics = run_dir / "metrics.jsonl"
    until(lambda: len(read_steps(metrics)) >= WARM_COMMITS, seconds=START_S, what="the first commits")
    time.sleep(options.settle)
    rng = random.Random(options.seed)
    measured = []
    for number, period_s in plan(options.every, options.rounds, options.seed):
        began, kills = time.time(), []
        for after_s in kill_times(period_s, options.window):
            time.sleep(max(0.0, began + after_s - time.time()))
            kills.append(Kill(kill_one(up, run_dir, rng), time.time()))
        time.sleep(max(0.0, began + options.window - time.time()))
        window = Window(number, period_s, began, time.time(), tuple(kills))
        measured.append(measure(window, read_steps(metrics)))
        loads.append(os.getloadavg()[0])
        print(_described(measured[-1], loads[-1]), flush=True)
        time.sleep(PAUSE_S)
    return measured


def _keep(place: Path, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copytree(place / "run/logs", directory / "logs", dirs_exist_ok=True)
    for path in (place / "run/metrics.jsonl", place / "up.log"):
        shutil.copy(path, directory)


def _described(window: dict[str, Any], load: float) -> str:
    line = (
        f"round {window['round']}, {_title(window['period_s'])}: {window['tokens_per_s']:.1f} tokens/s, "
        f"{window['commits']} commits in {window['seconds']:.0f} s, load {load:.1f}"
    )
    kills = [
        f"  {kill['at']:6.1f} s  {kill['name']:10} gap {kill['gap_s']:.1f} s" for kill in window["kills"]
    ]
    return "\n".join([line, *kills])


def _title(period_s: float) -> str:
    return f"a kill every {period_s:g} s" if period_s else "no kills"


if __name__ == "__main__":
    main()

"""Answers which bound E and which correction to use: runs on equal samples, over seeds, compared.

    python -m tests.benchmarks.staleness --out runs/staleness --jobs 8 [--tasks max3,sort3] [--seeds 5]

Makes a run for each task, correction, bound and seed that is not complete in OUT; then writes staleness.json,
staleness.md, staleness.png and curves-TASK.png there from all that are. Started again it continues where it
was stopped; --only-report makes no run, --small rehearses it. Exit code 1: a run failed, or is missing.
"""

import argparse
import datetime
import json
import os
import platform
import sys
from pathlib import Path

from tests.benchmarks.record import processor_name, record_now
from tests.benchmarks.staleness.curve import Curve, load_curve
from tests.benchmarks.staleness.execute import CURVE, Made, make_runs
from tests.benchmarks.staleness.figure import draw_curves, draw_summary
from tests.benchmarks.staleness.grid import BOUNDS, CORRECTIONS, TASKS, Cell, cells
from tests.benchmarks.staleness.summary import as_json, overview, summarise, table
from tests.benchmarks.versions import versions_of

PACKAGES = ("torch", "transformers", "numpy", "vllm", "megatron-core")


def _names(text: str, known: dict[str, object]) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - set(known)):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(known)}")
    return names


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare bounds and corrections on equal samples.")
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--tasks", type=lambda text: _names(text, dict(TASKS)), default=["max3", "sort3"])
    parser.add_argument(
        "--corrections", type=lambda text: _names(text, dict(CORRECTIONS)), default=list(CORRECTIONS)
    )
    parser.add_argument("--bounds", type=lambda text: [int(e) for e in text.split(",")], default=list(BOUNDS))
    parser.add_argument("--seeds", type=int, default=5, help="how many: 0, 1, ...")
    parser.add_argument("--steps", type=int, help="of a run, instead of those of its task")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, which share the cores")
    parser.add_argument("--limit-s", type=float, default=300, help="for one run")
    parser.add_argument("--stop-after-s", type=float, default=1e9, help="when no run is started any more")
    parser.add_argument("--only-report", action="store_true", help="make no run")
    parser.add_argument(
        "--small", action="store_true", help="two bounds, two corrections, two seeds, few steps: a rehearsal"
    )
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    """Make what is missing, write what is there, and return the exit code."""
    arguments = _arguments(words)
    if arguments.small:
        arguments.bounds, arguments.corrections, arguments.seeds = [0, 4], ["clip", "truncated"], 2
        arguments.steps = arguments.steps or 16
    wanted = cells(arguments.tasks, arguments.corrections, arguments.bounds, range(arguments.seeds))
    out: Path = arguments.out.absolute()
    missing = [cell for cell in wanted if not (out / cell.name / CURVE).exists()]
    print(f"{len(wanted)} runs, {len(missing)} of them to make", flush=True)
    if missing and not arguments.only_report:
        make_runs(
            missing,
            out,
            jobs=arguments.jobs,
            steps=arguments.steps,
            limit_s=arguments.limit_s,
            stop_after_s=arguments.stop_after_s,
            report=_say,
        )
    curves = {
        cell: load_curve(out / cell.name / CURVE) for cell in wanted if (out / cell.name / CURVE).exists()
    }
    absent = [cell.name for cell in wanted if cell not in curves]
    if curves:
        _write(curves, absent, out, words)
    for name in absent:
        print(f"missing: {name}")
    return 1 if absent else 0


def _say(made: Made) -> None:
    print(f"{made.cell.name}  {made.seconds:.0f} s  {made.problem}".rstrip(), flush=True)


def _write(curves: dict[Cell, Curve], absent: list[str], out: Path, words: list[str]) -> None:
    summaries = summarise(curves)
    tasks = list(dict.fromkeys(cell.task for cell in curves))
    facts = {
        "record": record_now(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python -m tests.benchmarks.staleness {' '.join(words)}".strip(),
        "cpu": {
            "model": processor_name() or platform.processor(),
            "usable": len(os.sched_getaffinity(0)),
        },
        "versions": versions_of(PACKAGES),
        "corrections": CORRECTIONS,
        "missing": absent,
        "summaries": as_json(summaries),
        "curves": {
            cell.name: {"points": curve.points, "rewards": curve.rewards, "lags": curve.lags}
            for cell, curve in curves.items()
        },
    }
    (out / "staleness.json").write_text(json.dumps(facts) + "\n")
    text = "\n\n".join(
        f"## {task}\n\n{overview(task, summaries)}\n\n{table(task, summaries)}" for task in tasks
    )
    (out / "staleness.md").write_text(text + "\n")
    draw_summary(summaries, out / "staleness.png")
    for task in tasks:
        draw_curves(task, curves, summaries, out / f"curves-{task}.png")
    print(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

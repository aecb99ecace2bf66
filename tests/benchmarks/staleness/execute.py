"""Makes the runs that are missing, several at a time, each with its own directory and its own CPU cores."""

import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path

from tests.benchmarks.staleness.curve import read_curve
from tests.benchmarks.staleness.grid import TASKS, Cell
from tests.benchmarks.versions import ROOT
from tests.integration.command import environment

CURVE = "curve.json"
FAILED = "failed.txt"
DONE_WITH = ("checkpoints", "exports", "model", "ledger", "spool.sqlite", "archive", "progress.png")
"""What a run leaves that is not kept once it is scored."""
STOP_S = 30
"""Seconds in which a run that is too slow may end what it has started."""


@dataclass(frozen=True, slots=True)
class Made:
    """How a run ended; `problem` is empty if it succeeded."""

    cell: Cell
    seconds: float
    problem: str = ""


def core_sets(jobs: int) -> list[list[int]]:
    """Return the CPU cores of each of `jobs` runs: equally many, and shared only where there are too few."""
    usable = sorted(os.sched_getaffinity(0))
    each = max(1, len(usable) // jobs)
    return [[usable[(job * each + core) % len(usable)] for core in range(each)] for job in range(jobs)]


def make_runs(
    wanted: Sequence[Cell],
    out: Path,
    *,
    jobs: int,
    steps: int | None,
    limit_s: float,
    stop_after_s: float,
    report: Callable[[Made], None],
) -> None:
    """Make the runs; returns when all have ended, or no more was started since the time was over.

    Args:
        steps: of each run; None for those of its task.
        limit_s: seconds after which a run is stopped and counts as failed.
        stop_after_s: seconds after which no run is started any more.
        report: called after each run.
    """
    end = time.monotonic() + stop_after_s
    context = multiprocessing.get_context("spawn")
    places: Queue[list[int]] = context.Queue()
    for cores in core_sets(jobs):
        places.put(cores)
    with ProcessPoolExecutor(jobs, context, initializer=_take_cores, initargs=(places,)) as pool:
        running = [pool.submit(_make_run, cell, out / cell.name, steps, limit_s, end) for cell in wanted]
        for future in as_completed(running):
            if (made := future.result()) is not None:
                report(made)


def _take_cores(places: "Queue[list[int]]") -> None:
    """Keep this process, and the runs that it starts, on its cores."""
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    os.sched_setaffinity(0, places.get())


def _make_run(cell: Cell, run_dir: Path, steps: int | None, limit_s: float, end: float) -> Made | None:
    """Make a run from the beginning and score it; None if there is no time for it."""
    if time.monotonic() > end:
        return None
    began = time.monotonic()
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    try:
        _up(cell, run_dir, steps or TASKS[cell.task].steps, limit_s)
        scores = {}
        if TASKS[cell.task].every:
            from tests.benchmarks.staleness.held_out import score_versions  # torch, in a worker alone

            scores = score_versions(run_dir)
        read_curve(run_dir, scores).write(run_dir / CURVE)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        (run_dir / FAILED).write_text(problem + "\n")
        return Made(cell, time.monotonic() - began, problem)
    for name in DONE_WITH:
        place = run_dir / name
        shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    return Made(cell, time.monotonic() - began)


def _up(cell: Cell, run_dir: Path, steps: int, limit_s: float) -> None:
    """Make the run by `tether up`.

    Raises:
        RuntimeError: it failed, or took longer than `limit_s`; says how it ended.
    """
    config = str(ROOT / TASKS[cell.task].config)
    command = [sys.executable, "-m", "services.cli", "up", config, "--run-dir", str(run_dir)]
    command += ["--steps", str(steps)]
    command += [word for setting in cell.overrides(steps) for word in ("--set", setting)]
    log = run_dir / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            raise RuntimeError(f"not done after {limit_s:g} s; its logs are in {run_dir}") from None
    if code:
        last = log.read_text(errors="replace").strip().splitlines()[-3:]
        raise RuntimeError(f"tether up ended with {code}: {' | '.join(last)}")

"""Measures open sessions on several workers at once: `python -m tests.benchmarks.sessions.many --out FILE`.

Each worker is a process with the scripted engine, beside one with its harnesses. All of its sessions have
made a call and keep their connection. All workers call at the same time, first through their endpoints and
then their engines directly, for the same tokens. Prints the figures, and writes them as JSON.
"""

import argparse
import asyncio
import datetime
import json
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Sequence
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import uvloop

from services.runtime.main import raise_fd_limit
from tests.benchmarks.record import processor_name, record_now
from tests.benchmarks.sessions.__main__ import CALLERS
from tests.benchmarks.sessions.worker import memory, running_worker

LATEST_S = 1800
"""Seconds for which a worker waits for the others."""
Rates = tuple[float, float]
"""Calls a second through the endpoint, and directly."""


async def measured(
    directory: Path, barrier: Barrier, *, count: int, turns: int, repeats: int
) -> tuple[float, list[Rates]]:
    """Return the memory of one of a worker's sessions that wait, kB, and its rates, round by round."""
    async with running_worker(directory, "scripted") as worker:
        warm = worker.open(8)
        await worker.called(warm, turns=3, at_once=1)
        worker.end(warm)
        before = memory()
        idle = worker.open(count - CALLERS)
        await worker.called(idle, turns=1, at_once=CALLERS)
        idle_kb = (memory() - before) / 1024 / len(idle)
        rates = []
        for _ in range(repeats):
            sessions = worker.open(CALLERS)
            await asyncio.to_thread(barrier.wait)  # all sessions of all workers are open
            through = await worker.called(sessions, turns=turns, at_once=CALLERS)
            await asyncio.to_thread(barrier.wait)
            direct = await worker.direct(sessions, at_once=CALLERS)
            await asyncio.to_thread(barrier.wait)
            rates.append((len(through.ms) / through.seconds, len(direct.ms) / direct.seconds))
            worker.end(sessions)
        return idle_kb, rates


def run_worker(
    barrier: Barrier, found: "Queue[tuple[float, list[Rates]] | None]", options: dict[str, int]
) -> None:
    """Measure one worker, in a process of its own; if it fails, the others end, too."""
    raise_fd_limit()
    try:
        with tempfile.TemporaryDirectory(prefix="tether-sessions-") as directory:
            found.put(uvloop.run(measured(Path(directory), barrier, **options)))
    except BaseException:
        barrier.abort()
        found.put(None)
        raise


def measure(workers: int, options: dict[str, int]) -> dict[str, Any]:
    """Measure all workers together."""
    context = multiprocessing.get_context("spawn")
    barrier, found = context.Barrier(workers, timeout=LATEST_S), context.Queue()
    processes = [context.Process(target=run_worker, args=(barrier, found, options)) for _ in range(workers)]
    for process in processes:
        process.start()
    ended = [found.get(timeout=LATEST_S) for _ in processes]
    for process in processes:
        process.join()
    parts = [part for part in ended if part is not None]
    if len(parts) < workers:
        raise RuntimeError(f"{workers - len(parts)} of {workers} workers failed, as is said above")
    rounds = [
        [sum(one) for one in zip(*rates, strict=True)] for rates in zip(*(r for _, r in parts), strict=True)
    ]
    return {
        "workers": workers,
        "open_sessions": workers * options["count"],
        "idle_session_kb": [round(kb, 1) for kb, _ in parts],
        "calls_per_s": [round(through, 1) for through, _ in rounds],
        "direct_calls_per_s": [round(direct, 1) for _, direct in rounds],
        "ratio": round(statistics.median(through / direct for through, direct in rounds), 3),
    }


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description="Measure open sessions on several workers at once.")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--open", type=int, default=2000, help="sessions that are open in each worker")
    parser.add_argument("--turns", type=int, default=20, help="calls of a session")
    parser.add_argument("--repeats", type=int, default=3, help="alternations of endpoints and engines")
    arguments = parser.parse_args(words)
    load = os.getloadavg()
    options = {"count": arguments.open, "turns": arguments.turns, "repeats": arguments.repeats}
    facts = {
        "record": record_now(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": {"model": processor_name(), "usable": len(os.sched_getaffinity(0))},
        "load_average": [round(number, 2) for number in load],
        "figures": measure(arguments.workers, options),
    }
    text = json.dumps(facts, indent=2)
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

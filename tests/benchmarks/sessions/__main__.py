"""Measures what the endpoint of sessions adds to a call: `python -m tests.benchmarks.sessions --out FILE`.

Harnesses in a process of their own call sessions of a worker with the scripted engine, each over a connection
of its own, with a history that grows by an answer and a result of a tool each turn. The reference is that
engine, asked for the same tokens directly; both alternate. Prints the figures, and writes them as JSON.
"""

import argparse
import cProfile
import datetime
import json
import os
import pstats
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from services.runtime.main import raise_fd_limit
from tests.benchmarks.record import processor_name, record_now
from tests.benchmarks.sessions.worker import MAX_TOKENS, Round, Worker, memory, running_worker
from tests.benchmarks.versions import versions_of

OPEN = (1, 64, 2000)
"""Sessions that are open."""
CALLERS = 16
"""Sessions that call, at most; the others have made a call, and keep their connection."""
TURNS = 20
SHOWN = (1, 2, 5, 10, 15, 20)
PACKAGES = ("aiohttp", "uvloop", "msgspec", "transformers", "tokenizers")


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values are."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def compared(through: Sequence[Round], direct: Sequence[Round]) -> dict[str, float]:
    """Return what the endpoint adds to the engine's own time, and to its CPU time, per call."""
    ours, theirs = ([ms for one in rounds for _, ms in one.ms] for rounds in (through, direct))
    cpu_ms = [1e3 * sum(one.cpu_s for one in rounds) for rounds in (through, direct)]
    return {
        "calls": len(ours),
        "p50_ms": statistics.median(ours),
        "p99_ms": percentile(ours, 0.99),
        "direct_p50_ms": statistics.median(theirs),
        "direct_p99_ms": percentile(theirs, 0.99),
        "added_p50_ms": statistics.median(ours) - statistics.median(theirs),
        "added_p99_ms": percentile(ours, 0.99) - percentile(theirs, 0.99),
        "ratio": statistics.median(ours) / statistics.median(theirs),
        "added_cpu_ms": (cpu_ms[0] - cpu_ms[1]) / len(ours),
    }


def by_round(through: Sequence[Round], direct: Sequence[Round]) -> list[float]:
    """Return the median that the endpoint adds in each round: other work on the machine disturbs some."""
    medians = [[statistics.median(ms for _, ms in one.ms) for one in rounds] for rounds in (through, direct)]
    return [ours - theirs for ours, theirs in zip(*medians, strict=True)]


def by_turn(through: Sequence[Round], direct: Sequence[Round]) -> dict[str, float]:
    """Return the median that the endpoint adds to a session's call, by its turn."""

    def of(rounds: Sequence[Round], turn: int) -> float:
        return statistics.median(ms for one in rounds for at, ms in one.ms if at == turn)

    last = max(turn for turn, _ in direct[0].ms)
    return {str(turn): of(through, turn) - of(direct, turn) for turn in SHOWN if turn <= last}


async def measure_open(worker: Worker, count: int, *, turns: int, repeats: int) -> dict[str, Any]:
    """Measure calls while `count` sessions are open: one call at a time, then many."""
    before = memory()
    idle = worker.open(max(0, count - CALLERS))
    if idle:
        await worker.called(idle, turns=1, at_once=CALLERS)
    memory_kb = (memory() - before) / 1024 / max(1, len(idle))
    callers, alone, reference, loaded, bare = min(count, CALLERS), [], [], [], []
    for _ in range(repeats if count > 1 else repeats * 4):
        sessions = worker.open(callers)
        alone.append(await worker.called(sessions, turns=turns, at_once=1))
        reuse = worker.reuse(sessions)
        reference.append(await worker.direct(sessions, at_once=1))
        tokens = worker.tokens
        worker.end(sessions)
        tokens -= worker.tokens
        if count > 1:
            sessions = worker.open(callers)
            loaded.append(await worker.called(sessions, turns=turns, at_once=callers))
            bare.append(await worker.direct(sessions, at_once=callers))
            worker.end(sessions)
    worker.end(idle)
    rounds = by_round(alone, reference)
    found: dict[str, Any] = {
        "one_at_a_time": compared(alone, reference),
        "added_p50_ms_least": min(rounds),
        "added_p50_ms_median": statistics.median(rounds),
        "rounds": len(rounds),
        "added_p50_ms_by_turn": by_turn(alone, reference),
        "tokens_of_a_session": tokens / callers,
        "prefix_hit_rate": reuse,
    }
    if loaded:
        found["many_at_once"] = compared(loaded, bare) | {
            "calls_per_s": statistics.median(len(one.ms) / one.seconds for one in loaded),
            "direct_calls_per_s": statistics.median(len(one.ms) / one.seconds for one in bare),
        }
    if idle:
        found["idle_session_kb"] = memory_kb
    return found


async def measure(directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure for each number of open sessions."""
    async with running_worker(directory, arguments.engine) as worker:
        warm = worker.open(8)
        await worker.called(warm, turns=3, at_once=1)
        worker.end(warm)
        return {
            str(count): await measure_open(worker, count, turns=arguments.turns, repeats=arguments.repeats)
            for count in arguments.open
        }


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description="Measure what the endpoint of sessions adds to a call.")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--open", type=int, nargs="+", default=list(OPEN), help="sessions that are open")
    parser.add_argument("--engine", default="scripted", help="vllm measures the reuse of prefixes alone")
    parser.add_argument("--turns", type=int, default=TURNS, help="calls of a session")
    parser.add_argument("--repeats", type=int, default=8, help="alternations of endpoint and engine")
    parser.add_argument("--profile", type=int, default=0, help="print so many lines of a profile")
    arguments = parser.parse_args(words)
    raise_fd_limit()
    load = os.getloadavg()
    profile = cProfile.Profile()
    with tempfile.TemporaryDirectory(prefix="tether-sessions-") as directory:
        if arguments.profile:
            profile.enable()
        figures = uvloop.run(measure(Path(directory), arguments))
        profile.disable()
    facts = {
        "record": record_now(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": {"model": processor_name(), "usable": len(os.sched_getaffinity(0))},
        "load_average": [round(number, 2) for number in load],
        "versions": versions_of(PACKAGES),
        "max_tokens": MAX_TOKENS,
        "figures": figures,
    }
    text = json.dumps(facts, indent=2, default=float)
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")
    if arguments.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(arguments.profile)


if __name__ == "__main__":
    main()

"""Updates and undisturbed stretches in turn, over a running load: what an update takes, and what requests see
of it."""

import asyncio
import statistics
from dataclasses import dataclass
from time import monotonic
from typing import Any

from tests.benchmarks.gpu.engine import Load, Measured
from tests.benchmarks.gpu.gaps import UNDISTURBED, Phase, Step, gaps_by_phase, rate, spread
from tests.benchmarks.gpu.updates import Way

SETTLE_S = 0.3
"""Between an update and the next undisturbed stretch."""
VERIFY_S = 60.0


@dataclass(slots=True)
class Update:
    """One, and the undisturbed stretch before it."""

    quiet: Phase
    phases: list[Phase]
    figures: dict[str, float]

    @property
    def began(self) -> float:
        return self.phases[0].began

    @property
    def ended(self) -> float:
        return self.phases[-1].ended


async def measure(
    engine: Measured, model: str, way: Way, *, updates: int, quiet_s: float, seconds: float, first: int
) -> dict[str, Any]:
    """Run one update that is not counted and then up to `updates`, for about `seconds` at most.

    Args:
        quiet_s: length of each undisturbed stretch.
        first: version of the first update.

    Returns: what `summary` makes of it, and "verified".
    """
    end = monotonic() + seconds
    done: list[Update] = []
    steps: list[Step] = []
    await way.prepare()
    async with Load(engine, model).running() as load:
        await way.update(first)
        for version in range(first + 1, first + 1 + updates):
            await asyncio.sleep(SETTLE_S)
            quiet_from = monotonic()
            await asyncio.sleep(quiet_s)
            quiet = Phase(UNDISTURBED, quiet_from, monotonic())
            phases, figures = await way.update(version)
            done.append(Update(quiet, phases, figures))
            if monotonic() + quiet_s + SETTLE_S + (phases[-1].ended - phases[0].began) > end:
                break
        await asyncio.sleep(SETTLE_S)
        steps += await engine.steps()
        streams = [list(times) for times in load.streams]
    # where the KV cache is computed again at an update, prefills are part of what it costs
    prefills = [] if engine.recomputes else [step.at for step in steps if step.prefill]
    found = summary(done, steps, streams, prefills)
    try:
        async with asyncio.timeout(VERIFY_S):
            found["verified"] = await way.verify()
    except Exception as error:
        found["verified"] = f"{type(error).__name__}: {error}"
    return found


def summary(
    updates: list[Update], steps: list[Step], streams: list[list[float]], prefills: list[float]
) -> dict[str, Any]:
    """Medians and spreads over the updates, and every update.

    Returns: "ms" by phase and "total"; "gaps" and "token_gaps" (milliseconds between steps, and between the
    tokens of a streamed request) by phase; "stall_ms": of each update's longest gap less the median
    undisturbed one; "decode": tokens/s undisturbed and during updates.
    """
    names = [phase.name for phase in updates[0].phases]
    rows = [
        {phase.name: phase.ms for phase in update.phases}
        | update.figures
        | {"total": (update.ended - update.began) * 1e3}
        for update in updates
    ]
    timeline = [phase for update in updates for phase in (update.quiet, *update.phases)]
    times = [step.at for step in steps]
    by_step = gaps_by_phase(times, timeline, prefills)
    by_token: list[list[float]] = [[] for _ in timeline]
    for stream in streams:
        for held, more in zip(by_token, gaps_by_phase(stream, timeline, prefills), strict=True):
            held += more
    usual = statistics.median(
        [
            gap
            for phase, gaps in zip(timeline, by_step, strict=True)
            if phase.name == UNDISTURBED
            for gap in gaps
        ]
        or [0.0]
    )
    width = 1 + len(names)
    stalls = [
        max((gap for gaps in by_step[i * width + 1 : (i + 1) * width] for gap in gaps), default=usual) - usual
        for i in range(len(updates))
    ]
    return {
        "updates": len(updates),
        "ms": {key: statistics.median(row[key] for row in rows) for key in rows[0]},
        "gaps": _merged(timeline, by_step),
        "token_gaps": _merged(timeline, by_token),
        "stall_ms": {"p50": statistics.median(stalls), "max": max(stalls)},
        "decode": _decode(updates, steps, prefills),
        "rows": rows,
    }


def _merged(timeline: list[Phase], gaps: list[list[float]]) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    for phase, more in zip(timeline, gaps, strict=True):
        found.setdefault(phase.name, []).extend(more)
    return {name: spread(values) for name, values in found.items()}


def _decode(updates: list[Update], steps: list[Step], prefills: list[float]) -> dict[str, float]:
    """Tokens per second over all stretches of a kind, without those in which prompts were computed if any
    other is left.

    "during" is from the beginning of an update to its end, "before_commit" to the beginning of its last
    phase.
    """
    clean = [
        update for update in updates if not any(update.quiet.began <= at <= update.ended for at in prefills)
    ] or updates
    quiet = [rate(steps, update.quiet.began, update.quiet.ended) for update in clean]
    during = [rate(steps, update.began, update.ended) for update in clean]
    before = [rate(steps, update.began, update.phases[-1].began) for update in clean]
    speeds = [
        sum(tokens for tokens, _ in kind) / max(1e-9, sum(seconds for _, seconds in kind))
        for kind in (quiet, during, before)
    ]
    share = speeds[1] / speeds[0] if speeds[0] else 0.0
    return {
        "undisturbed": speeds[0],
        "during": speeds[1],
        "before_commit": speeds[2],
        "share": share,
        "updates": len(clean),
    }

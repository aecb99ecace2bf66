"""Agents under the bound, in virtual time: 1,024 sessions at once, under each policy and bound.

python -m tests.benchmarks.sessions_bound --groups 1600 --out build/sessions_bound.json

Prints a table; the JSON has the same and the command. The figures depend on the arguments alone.
"""

import argparse
import asyncio
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from protocol.staleness import Policy
from tests.benchmarks.versions import versions_of
from tests.trials.simulation.sessions import Session, SessionScenario, SessionWorld
from tests.trials.simulation.world import Outcome

BOUNDS = (1, 2, 4, 8)
LONG = 0.1
"""Share of sessions that count as the long ones."""
COLUMNS = (
    ("policy", ""), ("E", "d"), ("sessions", "d"), ("steps_per_h", ".1f"), ("trained_per_s", ".0f"),
    ("lag_mean", ".2f"), ("lag_max", "d"), ("masked_share", ".1%"), ("wasted_share", ".1%"),
    ("trained", ".1%"), ("masked", ".1%"), ("all_masked", ".1%"), ("dropped", ".1%"), ("failed", ".1%"),
    ("kept", ".1%"), ("kept_of_long", ".1%"), ("waited_max", "d"), ("violations", "d"),
)  # fmt: skip
"""Column of the table, and how its figures are written."""


def figures(world: SessionWorld, outcome: Outcome) -> dict[str, Any]:
    """Return the figures of a run; shares are of sessions or, where the page says so, of tokens."""
    sessions = [session for group in world.fleet.sessions.values() for session in group]
    ends = Counter(session.outcome for session in sessions)
    trained, masked = outcome.lags.total(), outcome.counts["masked_tokens"]
    known = {"trained": ends["trained"], "masked": ends["masked"], "all_masked": ends["all masked"]}
    failed = ends["episode_s"] + ends["episode"]
    shares = {**known, "failed": failed, "dropped": len(sessions) - sum(known.values()) - failed}
    by_length = sorted(sessions, key=lambda session: session.length_ms)
    return {
        "policy": world.scenario.policy.value,
        "E": world.scenario.max_staleness,
        "sessions": len(sessions),
        "steps_per_h": outcome.audit.steps / outcome.virtual_h,
        "trained_per_s": trained / outcome.virtual_h / 3600,
        "lag_mean": sum(n * lag for lag, n in outcome.lags.items()) / trained,
        "lag_max": outcome.audit.max_lag,
        "masked_share": masked / (masked + trained),
        "wasted_share": 1 - trained / sum(session.tokens for session in sessions),
        **{name: count / len(sessions) for name, count in shares.items()},
        "kept": _kept(sessions),
        "kept_of_long": _kept(by_length[-round(LONG * len(sessions)) :]),
        "waited_max": max(world.waited),
        "violations": len(outcome.audit.violations),
        "dropped_by_reason": outcome.dropped,
        "ends": dict(ends),
        "versions_max": max(len(session.counts) for session in sessions),
        "virtual_h": outcome.virtual_h,
        "longest_s": by_length[-1].length_ms / 1000,
        "median_s": by_length[len(by_length) // 2].length_ms / 1000,
    }


def _kept(sessions: list[Session]) -> float:
    """Return the share of sampled tokens that were trained, of those of whole episodes."""
    whole = [session for session in sessions if not session.failed]
    return sum(session.trained for session in whole) / max(1, sum(session.tokens for session in whole))


async def run(scenario: SessionScenario) -> dict[str, Any]:
    """Simulate a run; its figures."""
    world = SessionWorld(scenario)
    outcome = await world.run()
    unfinished = [s for group in world.fleet.sessions.values() for s in group if not s.outcome]
    reasons = sum(outcome.dropped.get(name, 0) for name in ("attempts", "filter"))
    assert len(unfinished) <= reasons * scenario.samples, f"{len(unfinished)} sessions have no end"
    return figures(world, outcome)


def row(found: dict[str, Any]) -> str:
    """Return a row of the table."""
    return "| " + " | ".join(format(found[name], form) for name, form in COLUMNS) + " |"


def main(words: list[str]) -> int:
    """Simulate every policy and bound; 1 if any token was over the bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=1600, help="prompts, of eight sessions each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--step-s", type=float, default=60.0, help="seconds of a step")
    parser.add_argument("--bounds", type=int, nargs="*", default=list(BOUNDS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(words)
    base = SessionScenario(groups=arguments.groups, seed=arguments.seed, step_ms=arguments.step_s * 1000)
    print("| " + " | ".join(name for name, _ in COLUMNS) + " |", "|" + "---|" * len(COLUMNS), sep="\n")
    rows = []
    for policy in Policy:
        for bound in arguments.bounds:
            scenario = replace(base, policy=policy, max_staleness=bound)
            rows.append(asyncio.run(run(scenario)))
            print(row(rows[-1]), flush=True)
    if arguments.out is not None:
        command = f"python -m tests.benchmarks.sessions_bound {' '.join(words)}".strip()
        facts = {"command": command, "versions": versions_of(("msgspec",)), "rows": rows}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")
    return int(any(found["violations"] or found["lag_max"] > found["E"] for found in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

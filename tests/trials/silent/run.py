"""Runs the benchmark of silent faults: `python -m tests.trials.silent.run`.

For each fault it prints whether the audit found it, by which check, after how many steps, and whether the
alarm named the right place; then the alarms of clean runs, of which there must be none.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from protocol.errors import TetherError
from services.audit.alarms import Alarm
from tests.trials.silent import engine_faults, record_faults, trainer_faults
from tests.trials.silent.faults import FAULTS, Fault
from tests.trials.silent.world import open_world

MODULES = (engine_faults, record_faults, trainer_faults)
"""Import them to enter their faults."""
BEGINS = 2
"""Step at which a fault begins."""
STEPS = 8
"""Steps of a run, at most."""


async def trial(fault: Fault, seed: int = 0) -> dict[str, Any]:
    """Run with a fault until an alarm; returns the row of the table."""
    began, alarms, refusal = time.perf_counter(), list[Alarm](), ""
    with tempfile.TemporaryDirectory() as directory:
        async with open_world(Path(directory), seed, **fault.sections) as world:
            try:
                while world.step < STEPS and not alarms:
                    if world.step == BEGINS:
                        fault.inject(world)
                    alarms = await world.advance()
            except (TetherError, ExceptionGroup) as error:  # a fault that is refused is not a silent one
                refusal = f"REFUSED: {error!r}"
            finally:
                steps = world.step - BEGINS - fault.delay
                for undo in world.undo:
                    undo()
    right = [alarm for alarm in alarms if alarm.check in fault.found_by and steps > 0]
    named = [alarm for alarm in right if fault.where.items() <= dict(alarm.where).items()]
    return {
        "fault": fault.name,
        "found": bool(right),
        "check": ", ".join(alarm.check for alarm in alarms),
        "steps": steps if alarms else None,
        "named": bool(named),
        "alarm": (named or right or alarms)[0].sentence() if alarms else refusal,
        "seconds": round(time.perf_counter() - began, 1),
    }


async def clean(seed: int, steps: int, **sections: Any) -> list[str]:
    """Run without a fault; returns the alarms, of which there should be none."""
    with tempfile.TemporaryDirectory() as directory:
        async with open_world(Path(directory), seed, **sections) as world:
            return [alarm.sentence() for _ in range(steps) for alarm in await world.advance()]


async def table(only: str, clean_runs: int) -> dict[str, Any]:
    """Run all trials, printing each."""
    rows, false = [], []
    for fault in FAULTS:
        if only in fault.name:
            rows.append(row := await trial(fault))
            mark = "found" if row["found"] and row["named"] else "UNNAMED" if row["found"] else "MISSED"
            print(
                f"{mark:8}{row['fault']:48}{row['check']:20}{row['steps']} steps  {row['seconds']} s",
                flush=True,
            )
            print(f"        {row['alarm']}")
    for seed in range(1, clean_runs + 1):
        false += await clean(seed, STEPS)
    found = sum(row["found"] and row["named"] for row in rows)
    print(f"{found} of {len(rows)} faults found and named; {len(false)} alarms in {clean_runs} clean runs")
    for sentence in false:
        print(f"        {sentence}")
    return {"faults": rows, "clean_runs": clean_runs, "false_alarms": false}


def render(result: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    lines = ["| fault | found by | steps | it says |", "|---|---|---|---|"]
    for row in result["faults"]:
        said = row["alarm"].partition(": ")[2].partition("; by chance")[0].partition("; see it")[0]
        checks = ", ".join(dict.fromkeys(f"`{check}`" for check in row["check"].split(", ")))
        found = checks if row["found"] and row["named"] else f"**not found or not named** {checks}"
        lines.append(f"| {row['fault']} | {found} | {row['steps']} | {said} |")
    clean_runs = f"{len(result['false_alarms'])} alarms in {result['clean_runs']} runs without a fault."
    return "\n".join([*lines, "", clean_runs, ""])


def main() -> None:
    """Print the table, and write it as JSON, or as Markdown to a file of that name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a fault's name")
    parser.add_argument("--clean", type=int, default=20, help="runs without a fault")
    parser.add_argument("--out", type=Path, help="file for the table: .md is Markdown, else JSON")
    given = parser.parse_args()
    result = asyncio.run(table(given.only, given.clean))
    if given.out:
        is_page = given.out.suffix == ".md"
        given.out.write_text(render(result) if is_page else json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

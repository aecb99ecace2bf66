"""Runs the benchmark of silent faults: `python -m tests.trials.silent.run`.

For each fault it prints whether the audit found it, by which check, after how many steps, and whether the
alarm named the right place; then the alarms of clean runs, of which there must be none.

    python -m tests.trials.silent.run --engine vllm --dtype bfloat16 --clean 5 --only ...

With another engine than `hf` both engines are started once, and faults are left out that change a model of
transformers, or need engines of their own.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from protocol.errors import TetherError
from rollout.engines.base import Engine, EngineConfig
from services.audit.alarms import Alarm
from tests.benchmarks.record import record_now
from tests.contracts.sglang_environment import sglang_beside_others
from tests.trials.silent import engine_faults, record_faults, trainer_faults
from tests.trials.silent.faults import FAULTS, Fault
from tests.trials.silent.world import SCRATCH, open_engines, open_world, settings_of
from trainer.random_model import build_scratch

MODULES = (engine_faults, record_faults, trainer_faults)
"""Import them to enter their faults."""
BEGINS = 2
"""Step at which a fault begins."""
STEPS = 8
"""Steps of a run, at most."""


@asynccontextmanager
async def engines_of(config: EngineConfig) -> AsyncIterator[Sequence[Engine]]:
    """Start the engines of all runs; none for `hf`, of which each run has its own."""
    if config.name == "hf":
        yield ()
        return
    with tempfile.TemporaryDirectory() as directory:
        model_dir = build_scratch(SCRATCH, Path(directory) / "model")
        async with open_engines(settings_of(Path(directory), 0, engine=config), model_dir) as engines:
            yield engines


async def trial(fault: Fault, engines: Sequence[Engine] = (), **sections: Any) -> dict[str, Any]:
    """Run with a fault until an alarm; returns the row of the table."""
    began, alarms, refusal = time.perf_counter(), list[Alarm](), ""
    with tempfile.TemporaryDirectory() as directory:
        async with open_world(Path(directory), 0, engines, **sections, **fault.sections) as world:
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
                for engine in engines:  # what a fault has put over their methods
                    for name in ("generate", "commit"):
                        vars(engine).pop(name, None)
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


async def clean(seed: int, steps: int, engines: Sequence[Engine] = (), **sections: Any) -> list[str]:
    """Run without a fault; returns the alarms, of which there should be none."""
    with tempfile.TemporaryDirectory() as directory:
        async with open_world(Path(directory), seed, engines, **sections) as world:
            return [alarm.sentence() for _ in range(steps) for alarm in await world.advance()]


async def table(only: str, clean_runs: int, config: EngineConfig) -> dict[str, Any]:
    """Run all trials, printing each."""
    rows, false = [], []
    async with engines_of(config) as engines:
        for fault in FAULTS:
            if only not in fault.name or (engines and (fault.only_hf or fault.sections)):
                continue
            rows.append(row := await trial(fault, engines, engine=config))
            mark = "found" if row["found"] and row["named"] else "UNNAMED" if row["found"] else "MISSED"
            print(
                f"{mark:8}{row['fault']:48}{row['check']:20}{row['steps']} steps  {row['seconds']} s",
                flush=True,
            )
            print(f"        {row['alarm']}")
        for seed in range(1, clean_runs + 1):
            false += await clean(seed, STEPS, engines, engine=config)
    found = sum(row["found"] and row["named"] for row in rows)
    print(f"{found} of {len(rows)} faults found and named; {len(false)} alarms in {clean_runs} clean runs")
    for sentence in false:
        print(f"        {sentence}")
    return {
        "record": record_now(),
        "engine": config.name,
        "dtype": config.dtype,
        "faults": rows,
        "clean_runs": clean_runs,
        "false_alarms": false,
        "found": found,
        "trials": len(rows),
        "alarms": len(false),
    }


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
    parser.add_argument("--engine", default="hf", help="that generates, such as vllm or sglang")
    parser.add_argument("--dtype", default="float32", help="of the engine's parameters")
    parser.add_argument("--out", type=Path, help="file for the table: .md is Markdown, else JSON")
    given = parser.parse_args()
    own = sglang_beside_others() if given.engine == "sglang" else {"memory_fraction": 0.2}
    config = EngineConfig(name=given.engine, dtype=given.dtype, max_model_len=64, **own)
    result = asyncio.run(table(given.only, given.clean, config))
    if given.out:
        is_page = given.out.suffix == ".md"
        given.out.write_text(render(result) if is_page else json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

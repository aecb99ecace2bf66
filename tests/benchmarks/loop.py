"""The whole product, `tether up`, at E = 1 against E = 0.

`scripted`: generating a batch and training on it take equal time, so a loop that overlaps them perfectly is
twice as fast. `real`: the demo, vLLM and Megatron-core on this machine's CPU, where the two share the cores;
reported, without an aim.
"""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.run_record.steps import read_steps
from tests.benchmarks.table import Figure, Run, figure
from tests.integration.command import tether_up

REPEATS = 7
STEPS = 12
REAL_STEPS = 40
LEFT_OUT = 3
"""First steps, in which processes still start or the loop fills up."""
LIMIT_S = 600
GENERATE_S = TRAIN_S = 0.4
TOKENS = 8
SCRIPTED = (
    "bound.groups_per_step=8",
    "sampling.samples_per_prompt=2",
    f"sampling.max_tokens={TOKENS}",
    f"engine.seconds_per_token={GENERATE_S / TOKENS}",
    "engine.straggler_share=0.0",
    f"trainer.step_s={TRAIN_S}",
    "rollout.groups_in_flight=64",
)


def _up(config: str, run_dir: Path, steps: int, settings: Sequence[str]) -> list[dict[str, Any]]:
    """Run to the end; returns the step reports.

    Raises:
        RuntimeError: with the end of the output, if the command fails.
    """
    output = run_dir.with_suffix(".log")
    overrides = [word for setting in settings for word in ("--set", setting)]
    arguments = [f"deploy/configs/{config}", "--run-dir", str(run_dir), "--steps", str(steps), *overrides]
    with tether_up(*arguments, output=output) as process:
        code = process.wait(LIMIT_S)
    if code:
        raise RuntimeError(
            f"tether up {config} ended with {code}: {output.read_text(errors='replace')[-2000:]}"
        )
    return read_steps(run_dir / "metrics.jsonl")


def _intervals(steps: Sequence[dict[str, Any]]) -> list[float]:
    times = [step["time"] for step in steps[LEFT_OUT:]]
    return [after - before for before, after in itertools.pairwise(times)]


def run_scripted(directory: Path, *, quick: bool = False) -> tuple[dict[str, Figure], list[str]]:
    """`loop.speedup_e1_over_e0`: medians of the time between two commits."""
    runs: list[Run] = []
    for index in range(1 if quick else REPEATS):
        result: dict[str, float] = {}
        for bound in (0, 1):
            steps = _up(
                "stragglers.toml",
                directory / f"scripted-{index}-e{bound}",
                8 if quick else STEPS,
                [*SCRIPTED, f"bound.max_staleness={bound}"],
            )
            interval_s = statistics.median(_intervals(steps))
            result |= {
                f"e{bound}_interval_s": interval_s,
                f"e{bound}_steps_per_s": 1 / interval_s,
                f"e{bound}_wait_s": statistics.median(step["wait_s"] for step in steps[LEFT_OUT:]),
                f"e{bound}_train_s": statistics.median(step["train_s"] for step in steps[LEFT_OUT:]),
                f"e{bound}_lag_max": max(step["lag_max"] for step in steps),
            }
        runs.append(result)
    return {
        "loop.speedup_e1_over_e0": figure(
            runs, "e1_steps_per_s", unit="steps/s", reference="e0_steps_per_s", aim=1.8
        )
    }, []


def run_real(directory: Path, *, quick: bool = False) -> tuple[dict[str, Figure], list[str]]:
    """The demo's pace, one run for each bound. Each reference is the same figure at E = 0."""
    result: dict[str, float] = {}
    for bound in (0, 1):
        settings = [f"bound.max_staleness={bound}", "eval.at_end=false", "trainer.checkpoint_every=1000"]
        steps = _up("demo.toml", directory / f"real-e{bound}", 6 if quick else REAL_STEPS, settings)
        counted = steps[LEFT_OUT + 1 :]
        seconds = sum(_intervals(steps))
        pauses, busy = (
            [step[name] for step in counted if step[name] is not None] for name in ("pause_ms", "engine_busy")
        )
        result |= {
            f"e{bound}_steps_per_s": len(counted) / seconds,
            f"e{bound}_tokens_per_s": sum(step["trained_tokens"] for step in counted) / seconds,
            f"e{bound}_engine_busy": statistics.mean(busy),
            f"e{bound}_pause_ms_median": statistics.median(pauses),
            f"e{bound}_pause_ms_max": max(pauses),
        }
    units = {
        "steps_per_s": "steps/s",
        "tokens_per_s": "tokens/s",
        "engine_busy": "share",
        "pause_ms_median": "ms",
        "pause_ms_max": "ms",
    }
    return {
        f"real.e1_{name}": figure(
            [result], f"e1_{name}", unit=f"{unit} (reference: E = 0)", reference=f"e0_{name}"
        )
        for name, unit in units.items()
    }, []

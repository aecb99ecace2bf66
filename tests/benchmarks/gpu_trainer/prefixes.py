"""Measures steps that compute once what samples begin with alike, beside the same steps row by row.

    python -m tests.benchmarks.gpu_trainer.prefixes --out runs/bench-prefixes.json
    [--size 1.5b] [--device cuda] [--divide 1] [--repeat 2] [--set trainer.NAME=VALUE]

One process and one model make all steps, of both ways in turn. Exit code 1 if they are not the same step.
`--divide` makes samples shorter: a rehearsal on a CPU is `--device cpu --size tiny --divide 64 --repeat 1`.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu_trainer.shapes import VOCABULARY, model_directory
from tests.benchmarks.record import record_now
from tests.benchmarks.trainer.samples import Branches, Groups
from trainer.algorithms.base import Algorithm
from trainer.algorithms.registry import make_algorithm
from trainer.batch import Batch
from trainer.config import AlgorithmConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.megatron.backend import MegatronBackend

SAME = 0.02
"""Largest relative difference of the gradients' norms, in bfloat16."""
MEAN_ERROR = 0.05
"""Largest mean difference of log-probabilities, nats, in bfloat16."""


def works(divide: int) -> Iterator[tuple[Groups | Branches, float]]:
    """Yield batches, and how much faster each should be if shared."""
    for prompt, response, samples, groups, aim in (
        (256, 700, 8, 8, 1.15),
        (1024, 1024, 8, 4, 1.5),
        (4096, 1024, 8, 3, 2.7),
        (4096, 512, 8, 4, 3.7),
        (8192, 512, 16, 2, 6.5),
        (0, 956, 8, 8, 0.99),
    ):
        yield Groups(prompt // divide, response // divide, samples, groups), aim
    yield Branches(1024 // divide, 256 // divide, 20, 8, 2), 3.0


def main(words: list[str] | None = None) -> int:
    """Measure every work, print a table and write the results."""
    options = parse(words)
    algorithm = make_algorithm(AlgorithmConfig())
    backend = make_backend(options, algorithm)
    record = record_now()
    results = []
    for work, aim in works(options.divide):
        found = measure(backend, work.batch(algorithm, vocabulary=VOCABULARY), options.repeat)
        results.append({"work": str(work), "aim": aim, "size": options.size, **found})
        print(line(results[-1]), flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"record": record, "rows": results}, indent=1) + "\n")
    backend.close()
    return int(not all(found["same"] for found in results))


def parse(words: list[str] | None) -> argparse.Namespace:
    """Parse a command line, by default that of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", default="1.5b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--divide", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "bench-models")
    parser.add_argument("--set", action="append", default=[], help="trainer.NAME=VALUE")
    return parser.parse_args(words)


def make_backend(options: argparse.Namespace, algorithm: Algorithm) -> MegatronBackend:
    """Return the backend on one rank; on a CPU in float32."""
    given: dict[str, Any] = {"dtype": "bfloat16" if options.device == "cuda" else "float32"}
    for text in options.set:
        name, value = text.removeprefix("trainer.").split("=")
        given[name] = json.loads(value)
    return MegatronBackend(
        model_directory(options.size, options.models),
        parallel=ParallelConfig(),
        optimizer=OptimizerConfig(lr=0.0, weight_decay=0.0),
        trainer=TrainerConfig(device=options.device, threads=8 if options.device == "cuda" else 1, **given),
        algorithm=algorithm,
    )


def measure(backend: MegatronBackend, batch: Batch, repeat: int) -> dict[str, Any]:
    """Make steps of a batch in both ways; the weights stay as they are."""
    rows, rows_logprobs = one_way(backend, batch, repeat, shared=False)
    shared, logprobs = one_way(backend, batch, repeat, shared=True)
    error = (rows_logprobs - logprobs)[batch.sampled_mask].abs()
    near = math.isclose(rows["grad_norm"], shared["grad_norm"], rel_tol=SAME)
    return {
        "rows": rows,
        "shared": shared,
        "gain": rows["step_s"] / shared["step_s"],
        "gain_logprobs": rows["logprobs_s"] / shared["logprobs_s"],
        "logprob_error_mean": float(error.mean()),
        "logprob_error_max": float(error.max()),
        "same": near and float(error.mean()) < MEAN_ERROR,
    }


def one_way(
    backend: MegatronBackend, batch: Batch, repeat: int, *, shared: bool
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the figures of one way, and its log-probabilities."""
    backend._runner.shares_prefixes = shared  # as `trainer.share_prefixes` sets it, without a second model
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    stats = backend.train_step(batch)
    step_s = min(timed(lambda: backend.train_step(batch)) for _ in range(repeat))
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    logprobs = backend.logprobs(batch)
    found = {
        "tokens": stats.computed_tokens,
        "shared_share": stats.shared_share,
        "step_s": step_s,
        "logprobs_s": timed(lambda: backend.logprobs(batch)),
        "micro_batches": stats.micro_batches,
        "grad_norm": stats.grad_norm,
        "peak_gib": peak,
    }
    return found, logprobs


def timed(run: Callable[[], object]) -> float:
    """Return the seconds of a call, on the GPU, too."""
    began = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def line(found: dict[str, Any]) -> str:
    """Return a row of the table."""
    rows, shared, same = found["rows"], found["shared"], "" if found["same"] else "  NOT THE SAME STEP"
    return (
        f"{found['work']:23} tokens {rows['tokens']:7} -> {shared['tokens']:6}  "
        f"{rows['step_s']:7.3f} s -> {shared['step_s']:7.3f} s  "
        f"{found['gain']:5.2f} x (aim {found['aim']:g})  "
        f"log-probabilities {found['gain_logprobs']:5.2f} x  error {found['logprob_error_mean']:.2g}{same}"
    )


if __name__ == "__main__":
    sys.exit(main())

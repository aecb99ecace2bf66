"""Measures one way of making a step, in a process of its own, and prints a line of JSON.

python -m tests.benchmarks.gpu_trainer.measure WAY SIZE --models DIR [--samples 256] [--tokens 16384]
[--set parallel.data_parallel_size=2] [--compare 4]

`--compare` computes the log-probabilities of so many samples with plain Hugging Face in float32, too, and
prints the mean and the largest difference of the untrained model's.

Ways of ours run on as many GPUs as the sizes of `[parallel]` ask for, each with its replica's part of the
same samples. Without a GPU it is a rehearsal: --samples 8 with size `tiny`.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu_trainer.shapes import PROMPT, Work, make_work, model_directory, model_flops
from trainer.batch import Batch, StepTotals
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.data.packing import balance
from trainer.ranks.collectives import is_distributed, wait_for_ranks
from trainer.ranks.launch import result_of_ranks

CUDA = torch.cuda.is_available()
LIMIT_S = 400.0
"""For a measurement on several ranks."""

PEAK = 989e12
"""bfloat16 FLOP/s of an H100 and an H200 without sparsity, as its maker states."""
HF_WAYS = {
    "hf-padded": {"packed": False, "compiled": False},
    "hf-packed": {"packed": True, "compiled": False},
    "hf-compiled": {"packed": True, "compiled": True},
}
OUR_WAYS: dict[str, dict[str, Any]] = {
    "ours": {},
    "fsdp": {"backend": "fsdp"},
    "fsdp-compiled": {"backend": "fsdp", "compile": True},
    "fsdp-rowwise": {"backend": "fsdp", "compile": True, "fp8": "rowwise"},
    "fsdp-tensorwise": {"backend": "fsdp", "compile": True, "fp8": "tensorwise"},
}
"""Way -> settings of `[trainer]`."""


def main() -> None:
    """Run one way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=[*HF_WAYS, *OUR_WAYS])
    parser.add_argument("size")
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument(
        "--tokens", type=int, default=0, help="of a micro-batch; 0: 16384 for HF, auto for ours"
    )
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], help="ours: section.name=value")
    parser.add_argument("--compare", type=int, default=0, help="ours: samples")
    parser.add_argument("--profile", type=int, default=0, help="ours: print so many of a step's kernels")
    options = parser.parse_args()
    given = _settings(options)
    ranks = ParallelConfig(**given["parallel"]).world_size
    directory, work = model_directory(options.size, options.models), make_work(options.samples)
    if ranks > 1 and "WORLD_SIZE" not in os.environ:
        print(json.dumps(result_of_ranks(ranks, __spec__.name, *sys.argv[1:], limit_s=LIMIT_S)), flush=True)
        return
    found = (
        _ours(options, given, directory, work)
        if options.way in OUR_WAYS
        else _hugging_face(options, directory, work)
    )
    step_s = found["step_s"]
    found |= {
        "way": options.way,
        "size": options.size,
        "tokens": work.total,
        "trained_tokens": work.trained,
        "tokens_per_s": work.total / step_s,
        "gpus": ranks,
        "mfu": model_flops(options.size, work) / step_s / PEAK / ranks,
        "outside_gib": _outside_gib(),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if CUDA else None,
        "gpu": torch.cuda.get_device_name() if CUDA else None,
        "torch": torch.__version__,
    }
    if os.environ.get("RANK", "0") == "0":
        print(
            json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}), flush=True
        )


def _outside_gib() -> float | None:
    """Return the GPU's memory that torch's allocator does not have: CUDA's own, and NCCL's communicators."""
    if not CUDA:
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / 2**30


def _settings(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    given: dict[str, dict[str, Any]] = {
        "trainer": dict(OUR_WAYS.get(options.way, {})),
        "optimizer": {},
        "parallel": {},
    }
    for text in options.set:
        dotted, value = text.split("=")
        section, name = dotted.split(".")
        given[section][name] = json.loads(value)
    return given


def _timed(step: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Return the seconds of the first step and of the fastest of the others."""
    times = []
    for _ in range(1 + repeat):
        if is_distributed():
            wait_for_ranks()
        began = time.perf_counter()
        step()
        if CUDA:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return times[0], min(times[1:])


def _hugging_face(options: argparse.Namespace, directory: Path, work: Work) -> dict[str, Any]:
    """Make steps with Hugging Face; what does not fit is tried with half the tokens."""
    from tests.benchmarks.gpu_trainer.hugging_face import make_step

    budget = options.tokens or 16384
    while True:
        try:
            step = make_step(directory, work, budget=budget, **HF_WAYS[options.way])
            first, best = _timed(step, options.repeat)
            return {"step_s": best, "first_s": first, "micro_batch_tokens": budget}
        except torch.OutOfMemoryError:
            print(f"out of memory with {budget} tokens in a micro-batch", flush=True)
            budget //= 2
        step = None
        gc.collect()
        torch.cuda.empty_cache()


def _ours(
    options: argparse.Namespace, given: dict[str, dict[str, Any]], directory: Path, work: Work
) -> dict[str, Any]:
    """Make steps with a backend of ours, and passes for log-probabilities alone."""
    from tests.benchmarks.gpu_trainer.hugging_face import exact_logprobs
    from trainer.algorithms import AlgorithmConfig, make_algorithm
    from trainer.registry import make_backend

    exact = exact_logprobs(directory, work, options.compare)
    backend = make_backend(
        directory,
        parallel=ParallelConfig(**given["parallel"]),
        optimizer=OptimizerConfig(**{"lr": 1e-6, **given["optimizer"]}),
        trainer=TrainerConfig(
            **{"dtype": "bfloat16", "threads": 8, "micro_batch_tokens": options.tokens} | given["trainer"]
        ),
        algorithm=make_algorithm(AlgorithmConfig()),
    )
    rank = int(os.environ.get("RANK", "0"))
    replica = next(n for n, ranks in enumerate(backend.replicas) if rank in ranks)
    batch = make_batch(work, balance(work.lengths.tolist(), len(backend.replicas))[replica])
    apart = _apart(backend, work, exact, options.compare)
    first, best = _timed(lambda: backend.train_step(batch), options.repeat)
    with _profiled(options.profile):
        stats = backend.train_step(batch)
    _, logprobs_s = _timed(lambda: backend.logprobs(batch), 1)
    backend.close()
    return {
        "step_s": best,
        "first_s": first,
        "logprobs_over_step": logprobs_s / best,
        "micro_batches": stats.micro_batches,
        "padding_share": stats.padding_share,
        "memory_expected_gb": getattr(stats, "memory_expected_gb", None),
        "settings": options.set,
        **apart,
    }


@contextmanager
def _profiled(rows: int) -> Iterator[None]:
    """Print the kernels that take most of the time, to stderr; without any rows nothing is recorded."""
    if not rows:
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    kind, order = (
        (ProfilerActivity.CUDA, "cuda_time_total") if CUDA else (ProfilerActivity.CPU, "cpu_time_total")
    )
    with profile(activities=[kind]) as recorded:
        yield
        if CUDA:
            torch.cuda.synchronize()
    table = recorded.key_averages().table(sort_by=order, row_limit=rows, max_name_column_width=90)
    print(table, file=sys.stderr, flush=True)


def _apart(backend: Any, work: Work, exact: torch.Tensor, samples: int) -> dict[str, float]:
    """Return how far the backend's log-probabilities are from those in float32, nats; empty without any."""
    if not samples:
        return {}
    batch = make_batch(work, range(samples))
    apart = (backend.logprobs(batch)[batch.sampled_mask] - exact).abs()
    return {"logprob_mean_error": float(apart.mean()), "logprob_max_error": float(apart.max())}


def make_batch(work: Work, samples: Sequence[int] | None = None) -> Batch:
    """Return the work, or a replica's samples of it, as a batch of groups of 8, all of lag 0."""
    count = len(work.lengths)
    chosen = torch.tensor(range(count) if samples is None else samples)
    lengths = torch.from_numpy(work.lengths)[chosen]
    generator = torch.Generator().manual_seed(0)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    positions = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(lengths)
    sampled = positions >= PROMPT
    advantages = torch.randn(count, generator=generator)[chosen].repeat_interleave(lengths) * sampled
    return Batch(
        step=0,
        totals=StepTotals(samples=count, trained_tokens=work.trained, lag_max=0, fresh=True),
        offsets=offsets,
        tokens=torch.cat([work.tokens[sample] for sample in chosen]),
        loss_mask=sampled,
        sampled_mask=sampled.clone(),
        behaviour_logprobs=torch.where(sampled, -11.9, 0.0),
        versions=torch.where(sampled, 0, -1).int(),
        advantages=advantages,
        group_index=chosen // 8,
        rewards=torch.randn(count, generator=generator)[chosen],
        weights=1.0 / (count * (lengths - PROMPT).float()),
        measured=torch.ones(len(chosen), dtype=torch.bool),
    )


if __name__ == "__main__":
    main()

"""`make bench-trainer`: the trainer's step on a CPU against other ways of the same step, in one run.

    python -m tests.benchmarks.trainer.run [--out runs/bench-trainer.json] [--rounds 2] [--threads N]
    [--dtype float32] [--smoke]

Exit code 1 if two ways of the same step do not have the same gradient. An aim that is missed is printed, and
is no failure: figures depend on the machine.
"""

import argparse
import datetime
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from protocol.host.machine import has_bfloat16, usable_cores
from tests.benchmarks.record import processor_name, record_now
from tests.benchmarks.trainer.hugging_face import HuggingFaceStep
from tests.benchmarks.trainer.samples import (
    Groups,
    LongTail,
    batch_of,
    filled_up,
    padded_tokens,
    sorted_and_padded,
)
from tests.benchmarks.versions import ROOT, versions_of
from trainer.algorithms.registry import make_algorithm
from trainer.batch import Batch
from trainer.config import AlgorithmConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.data.packing import balance, pack
from trainer.megatron.backend import MegatronBackend

LEARNING_RATE = 1e-6
TOGETHER = 8
"""Samples of a padded micro-batch, which are neighbours in the batch."""
REPLICAS = 8
TENSOR_RANKS = 8
SAME = 0.02
"""Largest relative difference of two ways' gradient norms; bfloat16 differs most."""


@dataclass(frozen=True, slots=True)
class Job:
    """A model, and samples to train it on."""

    shape: Mapping[str, int]
    """As in a Hugging Face configuration."""
    tail: LongTail
    groups: Groups
    """Samples with prompts that are computed once, or for each."""
    budget: int
    """Tokens of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A ratio, and what it should be."""

    value: float
    aim: float
    at_most: bool = False

    @property
    def reached(self) -> bool:
        """Whether the aim is reached."""
        return self.value <= self.aim if self.at_most else self.value >= self.aim

    def __str__(self) -> str:
        aim = f"{'at most' if self.at_most else 'at least'} {self.aim:g}"
        return f"{self.value:8.3f}   {aim:14} {'reached' if self.reached else 'MISSED'}"


FULL = Job(
    {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
    LongTail(samples=24, prompt=16, mean=44, longest=256),
    Groups(prompt=64, response=64, samples=8, groups=3),
    budget=1024,
)
"""SmolLM2-135M; lengths a sixteenth of those of `BATCHES`."""
SMOKE = Job(
    {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 128,
    },
    LongTail(samples=16, prompt=4, mean=8, longest=24),
    Groups(prompt=6, response=6, samples=8, groups=2),
    budget=64,
)
BATCHES: Mapping[str, tuple[LongTail, int]] = {
    "256 samples": (LongTail(samples=256, prompt=256, mean=700, longest=4096), 16384),
    "8,192 samples of up to 32k tokens": (
        LongTail(samples=8192, prompt=256, mean=2200, longest=32768 - 256),
        32768,
    ),
}
"""Batches that are only packed -> lengths, and tokens of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the ways of a step took, and whether they are the same step."""

    seconds: dict[str, list[float]]
    """Way -> time of each round."""
    cpu_seconds: dict[str, list[float]]
    """Way -> time of all threads on a core, in each round."""
    gradient_norms: dict[str, float]
    """Trainer -> norm of the gradient of the same samples, from the same weights."""


def measure(job: Job, *, dtype: str, threads: int, rounds: int) -> Measured:
    """Make every way's step once in each round."""
    algorithm = make_algorithm(AlgorithmConfig())
    batch = batch_of(job.tail, algorithm, vocabulary=job.shape["vocab_size"])
    warm = batch.select(batch.lengths.argsort()[:4])
    groups = job.groups.batch(algorithm, vocabulary=job.shape["vocab_size"])
    with tempfile.TemporaryDirectory() as directory:
        model_dir = Path(directory)
        make_model(job, model_dir)
        ours = our_backend(job, model_dir, dtype=dtype, threads=threads)
        theirs = HuggingFaceStep(model_dir, dtype=getattr(torch, dtype), lr=LEARNING_RATE, budget=job.budget)
    torch.set_num_threads(threads)
    try:
        # The first steps make the optimizers' states.
        norms = {"ours": float(ours.train_step(warm).grad_norm), "hf": theirs.step(warm)}
        ways: dict[str, Callable[[], object]] = {
            "ours": lambda: ours.train_step(batch),
            "hf": lambda: theirs.step(batch),
            "ours_padded": lambda: ours.train_step(filled_up(batch, TOGETHER)),
            "logprobs": lambda: ours.logprobs(batch),
            "rows": lambda: group_step(ours, groups, shared=False),
            "shared": lambda: group_step(ours, groups, shared=True),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        cpu_seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds):
            for name, way in ways.items():
                began, busy = time.perf_counter(), time.process_time()
                way()
                seconds[name].append(time.perf_counter() - began)
                cpu_seconds[name].append(time.process_time() - busy)
                say(f"round {number + 1}: {name} {seconds[name][-1]:.2f} s")
    finally:
        ours.close()
    return Measured(seconds, cpu_seconds, norms)


def make_model(job: Job, model_dir: Path) -> None:
    """Write a model of the shape with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **job.shape,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(model_dir)


def our_backend(job: Job, model_dir: Path, *, dtype: str, threads: int) -> MegatronBackend:
    """Return the Megatron backend on one rank."""
    return MegatronBackend(
        model_dir,
        parallel=ParallelConfig(),
        optimizer=OptimizerConfig(lr=LEARNING_RATE),
        trainer=TrainerConfig(dtype=dtype, threads=threads, micro_batch_tokens=job.budget),
        algorithm=make_algorithm(AlgorithmConfig()),
    )


def group_step(backend: MegatronBackend, batch: Batch, *, shared: bool) -> None:
    """Make a step that computes prompts once, or for every sample."""
    backend._runner.shares_prefixes = shared  # as `trainer.share_prefixes` sets it, without a second model
    backend.train_step(batch)
    backend._runner.shares_prefixes = True


def packing(tail: LongTail, budget: int) -> dict[str, float]:
    """Pack a batch for `REPLICAS` replicas, without a model.

    Returns:
        Shares of padding: packed, on `TENSOR_RANKS` that divide the sequence, and sorted and padded; share of
        the budgets that stays empty; by how much the dearest replica is above the mean one; seconds.
    """
    lengths = tail.lengths()
    began = time.perf_counter()
    replicas = balance([float(length) for length in lengths], REPLICAS)
    computed = padded = room = 0
    for samples in replicas:
        own = [lengths[sample] for sample in samples]
        sizes = [sum(own[sample] for sample in taken) for taken in pack(own, budget, len(own))]
        computed += sum(-(-size // TENSOR_RANKS) * TENSOR_RANKS for size in sizes)
        room += sum(max(budget, size) for size in sizes)
        padded += padded_tokens(sorted_and_padded(own, budget), own)
    loads = [sum(lengths[sample] for sample in samples) for samples in replicas]
    return {
        "samples": len(lengths),
        "tokens": sum(lengths),
        "padding_share": 1 - sum(lengths) / computed,
        "padding_share_sorted_and_padded": 1 - sum(lengths) / padded,
        "empty_share": 1 - sum(lengths) / room,
        "imbalance": max(loads) * len(loads) / sum(loads) - 1,
        "seconds": time.perf_counter() - began,
    }


def figures_of(
    seconds: Mapping[str, list[float]], packed: Mapping[str, Mapping[str, float]]
) -> dict[str, Figure]:
    """Compare the best time of each way."""
    best = {name: min(times) for name, times in seconds.items()}
    return {
        "padding_share": Figure(max(row["padding_share"] for row in packed.values()), 0.05, at_most=True),
        "packed_over_padded": Figure(best["ours_padded"] / best["ours"], 1.5),
        "ours_over_hf": Figure(best["hf"] / best["ours"], 1.0),
        "logprobs_over_step": Figure(best["logprobs"] / best["ours"], 0.35, at_most=True),
        "shared_over_rows": Figure(best["rows"] / best["shared"], 1.3),
    }


def facts_of(job: Job, batch: Batch, *, dtype: str, threads: int) -> dict[str, Any]:
    """Return what was measured, where and with what."""
    lengths = batch.lengths.tolist()
    return {
        "record": record_now(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": processor_name() or platform.machine(),
        "cores": usable_cores(),
        "threads": threads,
        "dtype": dtype,
        "load_average": [round(number, 2) for number in os.getloadavg()],
        "versions": versions_of(("torch", "transformers", "megatron-core")),
        "model": dict(job.shape),
        "tokens": {
            "samples": len(lengths),
            "longest": max(lengths),
            "all": sum(lengths),
            "trained": batch.totals.trained_tokens,
            "padded": int(filled_up(batch, TOGETHER).offsets[-1]),
            "sorted_and_padded": padded_tokens(sorted_and_padded(lengths, job.budget), lengths),
            "micro_batch": job.budget,
        },
    }


def say(text: str) -> None:
    """Print progress."""
    print(f"bench-trainer: {text}", file=sys.stderr, flush=True)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line, by default that of the process."""
    parser = argparse.ArgumentParser(description="The trainer's step on a CPU.")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs/bench-trainer.json", help="where the JSON goes"
    )
    parser.add_argument("--rounds", type=int, default=2, help="how often each way makes its step")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of both trainers")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16" if has_bfloat16() else "float32"
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model: to see that it works")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print the figures, write the JSON."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything asks for a GPU
    arguments = parse(words)
    how = {"dtype": arguments.dtype, "threads": arguments.threads}
    job = SMOKE if arguments.smoke else FULL
    batch = batch_of(job.tail, make_algorithm(AlgorithmConfig()), vocabulary=job.shape["vocab_size"])
    facts = facts_of(job, batch, **how)
    say(", ".join(f"{name} {facts[name]}" for name in ("processor", "cores", "threads", "dtype", "versions")))
    packed = {name: packing(*each) for name, each in BATCHES.items()}
    measured = measure(job, rounds=arguments.rounds, **how)
    seconds, norms = measured.seconds, measured.gradient_norms
    figures = figures_of(seconds, packed)
    facts |= {
        "packing": packed,
        **asdict(measured),
        "figures": {name: asdict(row) | {"reached": row.reached} for name, row in figures.items()},
    }
    out: Path = arguments.out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(facts, indent=2) + "\n")
    for name, row in figures.items():
        print(f"{name:20}{row}")
    print(f"{facts['tokens']['trained'] / min(seconds['ours']):.0f} trained tokens/s, {out}")
    if not math.isclose(norms["ours"], norms["hf"], rel_tol=SAME):
        say(f"not the same step: the gradient's norm is {norms}")
        sys.exit(1)


if __name__ == "__main__":
    main()

"""Times building the batch of a large step, as trainer rank 0 does before anything is sent.

    python -m tests.benchmarks.ragged [--samples 8192] [--tokens 20000000] [--replicas 8]

Lengths are log-normal, up to 32,768 tokens. Peak memory is that of this process, with the records that it
reads, which a trainer has from its spool.
"""

import argparse
import json
import platform
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.codec import encode_payload
from protocol.messages import Rollout, ScoredRollout
from protocol.tensors import Array
from tests.trainer.commands import train_command
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.data.packing import balance
from trainer.step.train_command import TrainCommand, plan_command

LONGEST, PROMPT, GROUP = 32_768, 256, 16
SIGMA = 1.0
"""Standard deviation of the logarithm of lengths."""
STEP = 100


def lengths_of(samples: int, tokens: int, dice: np.random.Generator) -> NDArray[np.int32]:
    """Response lengths, log-normal, that come to about `tokens` with their prompts."""
    shape = dice.lognormal(0.0, SIGMA, samples)
    low, high = 0.0, float(LONGEST)
    for _ in range(60):
        scale = (low + high) / 2
        total = np.clip(shape * scale, 1, LONGEST - PROMPT).sum() + samples * PROMPT
        low, high = (scale, high) if total < tokens else (low, scale)
    lengths = np.clip(shape * scale, 1, LONGEST - PROMPT).astype(np.int32)
    lengths[0] = LONGEST - PROMPT
    return lengths


def record(group: int, lengths: NDArray[np.int32], dice: np.random.Generator) -> bytes:
    """The encoded group; the first token of a sample is over the bound."""
    total = int(lengths.sum())
    spans = [
        (i, end, of)
        for i, n in enumerate(lengths.tolist())
        for end, of in ((1, STEP - 2), (n, STEP))[n < 2 :]
    ]
    rollout = Rollout(
        group=group,
        token="lease",
        engine="engine.0",
        prompt_tokens=Array.of(dice.integers(0, 150_000, PROMPT), "int32"),
        lengths=Array.of(lengths, "int32"),
        tokens=Array.of(dice.integers(0, 150_000, total), "int32"),
        logprobs=Array.of(-dice.random(total, dtype=np.float32), "float32"),
        loss_mask=Array.of(np.ones(total), "uint8"),
        spans=Array.of(spans, "int32"),
        finish_reasons=("stop",) * len(lengths),
        responses=tuple("text" * int(n) for n in lengths),
    )
    return encode_payload(
        ScoredRollout(rollout=rollout, rewards=Array.of(dice.integers(0, 2, len(lengths)), "float32"))
    )


def step_of(samples: int, tokens: int) -> TrainCommand:
    dice = np.random.default_rng(0)
    lengths = lengths_of(samples, tokens, dice)
    records = [
        record(g, part, dice) for g, part in enumerate(np.split(lengths, range(GROUP, samples, GROUP)))
    ]
    return train_command(STEP, records)


def memory_gb() -> float:
    """The present resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e9


def run(samples: int, tokens: int, replicas: int) -> dict[str, Any]:
    """Build the step once as one rank, and once for each of several replicas."""
    command = step_of(samples, tokens)
    facts: dict[str, Any] = {"samples": samples, "replicas": replicas, "memory_before_gb": memory_gb()}
    with timer(facts, "plan_s"):
        plan = plan_command(command, make_algorithm(AlgorithmConfig()))
    facts |= {"tokens": plan.stats.step_tokens, "longest": int(plan.lengths.max())}
    facts |= {"memory_planned_gb": memory_gb()}
    with timer(facts, "balance_s"):
        pieces = balance(plan.lengths.tolist(), replicas)
    with timer(facts, "all_parts_s"):
        for piece in pieces:
            plan.part(piece)
    facts["peak_replicas_gb"] = peak_gb()
    with timer(facts, "whole_s"):
        plan.part(range(samples))
    facts["peak_one_rank_gb"] = peak_gb()
    return {name: round(value, 3) for name, value in facts.items()}


@contextmanager
def timer(facts: dict[str, Any], name: str) -> Iterator[None]:
    """Note the seconds that the block takes."""
    began = time.perf_counter()
    yield
    facts[name] = time.perf_counter() - began


def peak_gb() -> float:
    """The largest resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--replicas", type=int, default=8)
    options = parser.parse_args()
    facts = run(options.samples, options.tokens, options.replicas)
    versions = {name: version(name) for name in ("torch", "numpy", "msgspec", "xxhash")}
    print(json.dumps(facts | {"python": platform.python_version(), "versions": versions}, indent=2))


if __name__ == "__main__":
    main()

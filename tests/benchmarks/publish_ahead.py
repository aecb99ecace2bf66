"""Measures what it gains to publish a version while the optimizer in host memory makes it.

    python -m tests.benchmarks.publish_ahead [--transport shm] [--rounds 5] [--threads 1] [--model DIR]

Prints a line of JSON: seconds of a step on few tokens together with the publication of its version, the best
of each way, and what of them the publication waited. Ways alternate. On a GPU where there is one; without
--model it is a random one of the shape of SmolLM2-135M.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from protocol.codec import encode_payload
from tests.benchmarks.trainer.run import FULL, make_model
from tests.trainer.commands import train_command
from tests.trainer.groups import GroupSpec, SampleSpec, scored
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.backends.early_export import Tensors
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig, WeightConfig
from trainer.execution.executor import Executor
from trainer.registry import make_backend
from trainer.roles.models import RankModels
from trainer.step.train_command import TrainCommand
from trainer.weights.base import WeightSender
from trainer.weights.bucket_writer import in_dtype
from trainer.weights.registry import make_sender

TOKENS = 64
"""Tokens of each of two samples."""


def main() -> None:
    """Measure both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if options.model is None:
            make_model(FULL, Path(directory))
        _measure(options, options.model or Path(directory), Path(directory))


def _measure(options: argparse.Namespace, model_dir: Path, directory: Path) -> None:
    algorithm, on_gpu = make_algorithm(AlgorithmConfig()), torch.cuda.is_available()
    backend = make_backend(
        model_dir,
        parallel=ParallelConfig(),
        optimizer=OptimizerConfig(cpu_offload=True),
        trainer=TrainerConfig(dtype="bfloat16" if on_gpu else "float32", threads=options.threads),
        algorithm=algorithm,
    )
    leader = Executor(RankModels(backend, algorithm=algorithm))
    config = WeightConfig(transport=options.transport)
    sender = make_sender(config, backend, "bfloat16", run="bench", run_dir=directory)
    assert sender is not None
    totals: dict[str, list[float]] = {"after": [], "during": []}
    waits: dict[str, list[float]] = {"after": [], "during": []}
    with ThreadPoolExecutor(1) as thread:
        for version in range(2 * options.rounds + 2):
            way = ("after", "during")[version % 2]
            publish = partial(_publish, sender, version + 1)
            ahead = _Ahead(thread, publish)
            began = time.perf_counter()
            leader.train(_command(version), ahead.begin if way == "during" else None)
            trained = time.perf_counter()
            if ahead.publication is None:
                publish(leader.models.policy.export())
            else:
                ahead.publication.result()
            if version > 1:  # the first of each makes state and buffers
                totals[way].append(time.perf_counter() - began)
                waits[way].append(time.perf_counter() - trained)
            sender.retire(frozenset({version + 1}))
    sender.close()
    backend.close()
    facts = {f"{way}_s": min(times) for way, times in totals.items()}
    facts |= {f"publish_{way}_s": min(times) for way, times in waits.items()}
    print(json.dumps({"transport": options.transport, "threads": options.threads, **facts}), flush=True)


@dataclass(slots=True)
class _Ahead:
    """Begins a publication in a thread."""

    thread: ThreadPoolExecutor
    publish: Callable[[Tensors], None]
    publication: Future[None] | None = None

    def begin(self, tensors: Tensors) -> None:
        self.publication = self.thread.submit(self.publish, tensors)


def _publish(sender: WeightSender, version: int, tensors: Tensors) -> None:
    sender.publish("bench", version, in_dtype(tensors, "bfloat16"))


def _command(step: int) -> TrainCommand:
    samples = [SampleSpec([5] * TOKENS, [step] * TOKENS, reward) for reward in (0.0, 1.0)]
    return train_command(step, [encode_payload(scored(GroupSpec(group=step, samples=samples)))])


if __name__ == "__main__":
    main()

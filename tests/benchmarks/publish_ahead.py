"""What it gains to publish a version while the optimizer in host memory makes it.

    python -m tests.benchmarks.publish_ahead [--transport shm] [--rounds 5] [--threads 1] [--model DIR]

Prints a line of JSON: seconds of a step on few tokens together with the publication of its version, the best
of each way, and what of them the publication waited. Ways alternate. On a GPU where there is one; without
--model it is a random one of the shape of SmolLM2-135M.
"""

import argparse
import asyncio
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from protocol.codec import encode_payload
from services.trainer.model_runner import ModelRunner
from tests.benchmarks.trainer.run import FULL, make_model
from tests.trainer.groups import GroupSpec, SampleSpec, scored
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.backends.leader import LeaderRank
from trainer.backends.rank_commands import TrainCommand
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig, WeightConfig
from trainer.registry import make_backend
from trainer.roles.models import RankModels
from trainer.weights.registry import make_sender

TOKENS = 64
"""Of each of two samples."""


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
        asyncio.run(_measure(options, options.model or Path(directory), Path(directory)))


async def _measure(options: argparse.Namespace, model_dir: Path, directory: Path) -> None:
    algorithm, on_gpu = make_algorithm(AlgorithmConfig()), torch.cuda.is_available()
    thread = ThreadPoolExecutor(1)

    def load() -> LeaderRank:
        backend = make_backend(
            model_dir,
            parallel=ParallelConfig(),
            optimizer=OptimizerConfig(cpu_offload=True),
            trainer=TrainerConfig(dtype="bfloat16" if on_gpu else "float32", threads=options.threads),
            algorithm=algorithm,
        )
        return LeaderRank(RankModels(backend), algorithm)

    leader = await asyncio.get_running_loop().run_in_executor(thread, load)
    sender = make_sender(WeightConfig(transport=options.transport), run="bench", run_dir=directory)
    runner = ModelRunner(leader, sender, thread, engine_dtype="bfloat16")
    totals: dict[str, list[float]] = {"after": [], "during": []}
    waits: dict[str, list[float]] = {"after": [], "during": []}
    for version in range(2 * options.rounds + 2):
        way = ("after", "during")[version % 2]
        announce = (lambda draft: None) if way == "during" else None
        began = time.perf_counter()
        await runner.train(_command(version), epoch="bench", announce=announce)
        trained = time.perf_counter()
        await runner.publish("bench", version + 1)
        if version > 1:  # the first of each makes state and buffers
            totals[way].append(time.perf_counter() - began)
            waits[way].append(time.perf_counter() - trained)
        sender.retire(frozenset({version + 1}))
    await runner.close()
    facts = {f"{way}_s": min(times) for way, times in totals.items()}
    facts |= {f"publish_{way}_s": min(times) for way, times in waits.items()}
    print(json.dumps({"transport": options.transport, "threads": options.threads, **facts}), flush=True)


def _command(step: int) -> TrainCommand:
    samples = [SampleSpec([5] * TOKENS, [step] * TOKENS, reward) for reward in (0.0, 1.0)]
    return TrainCommand(
        step=step,
        records=[encode_payload(scored(GroupSpec(group=step, samples=samples)))],
        bounds=[1],
        mask_late=True,
        temperature=1.0,
        recompute_logprobs=False,
        reference_logprobs=False,
    )


if __name__ == "__main__":
    main()

"""One rank of the trainer: a real Megatron backend with random weights, which steps and publishes on orders.

    torchrun --nproc-per-node 2 -m tests.benchmarks.gpu_reshard.rank --model 7b --model-dir DIR --sockets DIR
    --transport ipc

Rank 0 takes orders as lines of JSON on the socket DIR/0, from one client at a time; the others follow it as
the trainer's own ranks do. It says {"event": "ready"} on stdout when a version has been published.
"""

import argparse
import faulthandler
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from protocol.host.prctl import die_with_parent
from tests.benchmarks.gpu.session import say
from tests.benchmarks.gpu.shapes import SIZES, device, group_backend
from tests.benchmarks.gpu_reshard.follower import Follower, Memory
from tests.benchmarks.gpu_reshard.orders import Orders
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig, WeightConfig
from trainer.megatron import part
from trainer.megatron.backend import MegatronBackend
from trainer.roles.models import RankModels
from trainer.weights.registry import make_sender

STD = 0.02
LR = 1e-4
"""Changes most of the weights in bfloat16, by little."""
TIMEOUT_S = 60.0


def fill_randomly(directory: Path, spec: Any, parameters: Mapping[str, torch.Tensor], *place: Any) -> None:
    """Fill a rank's parameters without a checkpoint, in place of `load_checkpoint`."""
    torch.manual_seed(int(os.environ["RANK"]))
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.dim() > 1:
                parameter.normal_(std=STD)
            else:  # some of these are equal on all ranks
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)


class PerturbedMegatron(MegatronBackend):
    """Changes its weights without a step."""

    def perturb(self, factor: float) -> None:
        """Multiply all weights, in place of a step; in any thread."""
        device = self.position.device
        # the default stream of a rank that waits for a command in a kernel stands still
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.no_grad(), torch.cuda.stream(stream):
            torch._foreach_mul_(list(self._parameters.values()), factor)
        if stream is not None:
            stream.synchronize()


def make_backend(model_dir: Path, dtype: str, ranks: int) -> PerturbedMegatron:
    """Return this rank's part with random weights; Adam's moments are still to be made by the first step."""
    part.load_checkpoint = fill_randomly
    return PerturbedMegatron(
        model_dir,
        parallel=ParallelConfig(tensor_model_parallel_size=ranks),
        optimizer=OptimizerConfig(lr=LR),
        trainer=TrainerConfig(dtype=dtype, micro_batch_tokens=2048),
        algorithm=make_algorithm(AlgorithmConfig()),
    )


def main() -> None:
    """Be the rank that torchrun's environment names, until the order to exit."""
    die_with_parent(signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1)
    parser = argparse.ArgumentParser(description="A rank of the trainer.")
    parser.add_argument("--model", choices=SIZES, required=True)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--sockets", type=Path, required=True)
    parser.add_argument("--transport", required=True)
    parser.add_argument("--backend", default=group_backend())
    parser.add_argument("--perturb", action="store_true")
    arguments = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    began, dtype = time.monotonic(), SIZES[arguments.model].dtype
    backend = make_backend(arguments.model_dir, dtype, ranks)
    models, memory = RankModels(backend), Memory(device())
    config = WeightConfig(
        transport=arguments.transport, backend=arguments.backend, keep=1, timeout_s=TIMEOUT_S
    )
    run = f"reshard-{os.getpid()}"
    sender = make_sender(config, backend, dtype, run=run, run_dir=arguments.sockets, rank=rank)
    if rank:
        Follower(rank, memory, arguments.sockets, backend.perturb).follow(models, sender)
        if sender is not None:
            sender.close()
        models.close()
        return
    assert sender is not None
    others = [arguments.sockets / str(other) for other in range(1, ranks)]
    perturb = backend.perturb if arguments.perturb else None
    orders = Orders(models, sender, memory, dtype, others, perturb)
    try:
        orders.warm_up()
        say("ready", start_s=time.monotonic() - began, **json.loads(json.dumps(orders.describe())))
        orders.serve(arguments.sockets / "0")
    finally:
        orders.close()


if __name__ == "__main__":
    main()

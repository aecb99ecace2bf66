"""Runs one rank of steps of several updates; rank 0 writes down the weights and what was measured."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.trainer.measured import flat
from tests.trainer.step.plain_updates import OPTIMIZER, RECIPES, STEPS, command
from trainer.algorithms import make_algorithm
from trainer.backends.base import Backend
from trainer.config import ParallelConfig, TrainerConfig
from trainer.execution.commands import CopyWeightsCommand, ExitCommand
from trainer.execution.executor import Executor
from trainer.registry import make_backend
from trainer.roles.entropy import EntropyControl
from trainer.roles.models import RankModels

LAYOUTS = {
    "data": ParallelConfig(data_parallel_size=2),
    "tensor": ParallelConfig(tensor_model_parallel_size=2),
    "pipeline": ParallelConfig(pipeline_model_parallel_size=2),
    "context": ParallelConfig(context_parallel_size=2),
}


def models(model_dir: Path, recipe: str, backend: str, parallel: ParallelConfig | None = None) -> RankModels:
    config = RECIPES[recipe]
    made: Backend = make_backend(
        model_dir,
        parallel=parallel or ParallelConfig(),
        optimizer=OPTIMIZER,
        trainer=TrainerConfig(backend=backend, micro_batch_size=2, device="cpu"),
        algorithm=make_algorithm(config),
    )
    return RankModels(
        made,
        algorithm=make_algorithm(config),
        entropy=EntropyControl(config) if config.entropy_target else None,
    )


def run(layout: str, model_dir: Path, out: Path) -> None:
    torch.set_num_threads(1)
    for recipe in RECIPES:
        rank = models(model_dir, recipe, "megatron", LAYOUTS[layout])
        if int(os.environ["RANK"]):
            Executor(rank).follow()
        else:
            leader = Executor(rank)
            stats = [flat(leader.train(command(recipe, step))[1]) for step in range(STEPS)]
            save_file(
                {name: t.clone() for name, t in leader.lead(CopyWeightsCommand("float32")).items()},
                out / f"{recipe}.safetensors",
            )
            (out / f"{recipe}.json").write_text(json.dumps(stats))
            leader.lead(ExitCommand())
        dist.barrier()
        rank.close()


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))

"""Be one of two ranks that train with gradients added up in the backward pass, and after it: equal bits."""

import dataclasses
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from tests.trainer.megatron.models import OPTIMIZER, step_batch
from tests.trainer.megatron.ranks import ALGORITHM, part_of
from trainer.backends.base import StepStats
from trainer.config import ParallelConfig, TrainerConfig
from trainer.megatron import optimizer
from trainer.megatron.backend import MegatronBackend

BUCKET = 2000
"""Elements: several buckets in a layer."""
REPLICAS = ParallelConfig(data_parallel_size=2)
LAYOUTS = {
    "qwen3-tied": REPLICAS,
    "qwen2": dataclasses.replace(REPLICAS, use_distributed_optimizer=False),
    "qwen2-tied": ParallelConfig(context_parallel_size=2),
    "qwen3-moe": dataclasses.replace(REPLICAS, expert_model_parallel_size=2),
}
"""Model -> layout in which it is trained."""


def trained(
    model_dir: Path, parallel: ParallelConfig
) -> tuple[list[StepStats], dict[str, torch.Tensor], int]:
    """The steps, the parameters after them, and the buckets that were added up on their own."""
    backend = MegatronBackend(
        model_dir,
        parallel=parallel,
        optimizer=dataclasses.replace(OPTIMIZER, clip_grad=0.0),
        trainer=TrainerConfig(device="cpu", micro_batch_tokens=30, process_group_timeout_s=120.0),
        algorithm=ALGORITHM,
    )
    stats = [
        backend.train_step(part_of(backend, step_batch(model_dir.name, step)))
        for step in range(3)  # of which one leaves a replica without a sample
    ]
    parameters = {name: tensor.clone() for name, tensor in backend._parameters.items()}
    (wrapped,) = backend._runner.chunks
    buckets = sum(len(group.buckets) for group in wrapped.bucket_groups)
    backend.close()
    return stats, parameters, buckets


def main(root: Path) -> None:
    torch.set_num_threads(1)
    optimizer.DistributedDataParallelConfig = partial(  # type: ignore[misc]
        optimizer.DistributedDataParallelConfig, bucket_size=BUCKET
    )
    for name, parallel in LAYOUTS.items():
        overlapping = dataclasses.replace(parallel, overlap_grad_reduce=True)
        plain, parameters, whole = trained(root / name, parallel)
        stats, found, buckets = trained(root / name, overlapping)
        assert buckets > whole, (name, buckets, whole)
        for one, other in zip(stats, plain, strict=True):  # shards of buckets sum the norm in their order
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)
            assert msgspec.structs.replace(one, grad_norm=other.grad_norm) == other
        assert all(torch.equal(found[key], tensor) for key, tensor in parameters.items()), name


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Tests the shapes that a stage of the interleaved schedule expects, and every family's passes on a GPU.

test_layouts.py runs the schedule, and the families on a CPU.
"""

from pathlib import Path

import pytest

from tests.trainer.megatron.models import (
    ALL_MODELS,
    OPTIMIZER,
    make_batch,
    make_model,
    plain_logprobs,
    save_model,
)
from tests.trainer.megatron.ranks import ALGORITHM
from trainer.config import ParallelConfig, TrainerConfig
from trainer.megatron.backend import MegatronBackend
from trainer.megatron.forward import interleaved_shapes

SHAPES = [(size,) for size in (5, 7, 11, 13)]


def sizes(*, is_first: bool = False, is_last: bool = False) -> tuple[list[int], list[int]]:
    found = interleaved_shapes(SHAPES, stages=2, chunks=2, is_first=is_first, is_last=is_last)
    activations, gradients = ([size for (size,) in part] for part in found)
    return activations, gradients


def test_a_stage_receives_groups_of_micro_batches_for_each_of_its_chunks() -> None:
    everything = [5, 7, 5, 7, 11, 13, 11, 13]
    assert sizes() == (everything, everything)


def test_the_first_stage_has_no_activation_for_its_first_chunk_nor_the_last_a_gradient_for_its_last() -> None:
    around = [5, 7, 11, 13]
    assert sizes(is_first=True)[0] == around
    assert sizes(is_last=True)[1] == around


def made(directory: Path, **trainer: str) -> MegatronBackend:
    return MegatronBackend(
        directory,
        parallel=ParallelConfig(),
        optimizer=OPTIMIZER,
        trainer=TrainerConfig(**trainer),  # type: ignore[arg-type]
        algorithm=ALGORITHM,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", sorted(ALL_MODELS))
def test_a_family_on_a_gpu_computes_what_transformers_does_on_a_cpu(
    name: str, dtype: str, tmp_path: Path
) -> None:
    """Half precision rounds; a wrong window, cap, sink or order of experts is off by tenths."""
    batch = make_batch(name)
    expected, _ = plain_logprobs(make_model(name), batch)
    backend = made(save_model(name, tmp_path), device="cuda", dtype=dtype)
    difference = (backend.logprobs(batch) - expected.detach())[batch.sampled_mask].abs()
    found = backend.train_step(batch)
    backend.close()
    oracle = made(save_model(name, tmp_path), device="cpu", dtype="float32")
    stats = oracle.train_step(batch)
    oracle.close()
    print(
        name,
        dtype,
        f"median {difference.median():.2g} max {difference.max():.2g}",
        found.grad_norm,
        stats.grad_norm,
    )
    assert difference.median() < (1e-4 if dtype == "float32" else 0.03)
    assert found.grad_norm == pytest.approx(stats.grad_norm, rel=1e-3 if dtype == "float32" else 0.1)

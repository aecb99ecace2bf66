"""Tests the shapes that a stage of the interleaved schedule expects, and every family's passes on a GPU.

test_layouts.py runs the schedule, and the families on a CPU.
"""

from pathlib import Path

import pytest
import torch

from tests.trainer.megatron.models import (
    ALL_MODELS,
    OPTIMIZER,
    make_batch,
    make_model,
    plain_logprobs,
    plain_loss,
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


HALF = [(name, "bfloat16") for name in sorted(ALL_MODELS)]
OTHERS = [("qwen2", "float16"), ("qwen3-moe", "float16"), ("gpt-oss", "float32"), ("deepseek-v3", "float32")]
TOLERANCE = {"bfloat16": (0.03, 0.1), "float16": (0.01, 0.05), "float32": (1e-4, 1e-3)}
"""Data type -> median difference of log-probabilities, relative one of the gradient's norm."""


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), HALF + OTHERS)
def test_a_family_on_a_gpu_computes_what_transformers_does_on_a_cpu(
    name: str, dtype: str, tmp_path: Path
) -> None:
    """Half precision rounds, and may pick other experts; a wrong window, cap or sink is off by tenths."""
    batch, model = make_batch(name), make_model(name)
    expected, entropy = plain_logprobs(model, batch)
    plain_loss(ALGORITHM, batch, expected, entropy).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    backend = MegatronBackend(
        save_model(name, tmp_path),
        parallel=ParallelConfig(),
        optimizer=OPTIMIZER,
        trainer=TrainerConfig(device="cuda", dtype=dtype),
        algorithm=ALGORITHM,
    )
    with torch.compiler.set_stance("force_eager"):  # compiling for each model would take minutes
        difference = (backend.logprobs(batch) - expected.detach())[batch.sampled_mask].abs()
        norm = backend.train_step(batch).grad_norm
    backend.close()
    print(
        name,
        dtype,
        f"median {difference.median():.2g}, norms {norm} {torch.nn.utils.get_total_norm(gradients)}",
    )
    assert difference.median() < TOLERANCE[dtype][0]
    expected_norm = float(torch.nn.utils.get_total_norm(gradients))
    assert norm == pytest.approx(expected_norm, rel=TOLERANCE[dtype][1])

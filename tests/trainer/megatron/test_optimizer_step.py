"""Tests that a step may add up gradients in the backward pass, and is repeated if it runs out of memory."""

import gc
from pathlib import Path

import pytest
import torch

from tests.benchmarks.gpu_loop.job import WORDS, make_files
from tests.benchmarks.trainer.samples import LongTail, batch_of
from tests.changes import slow_unless_changed
from tests.trainer.megatron.launch import launch
from tests.trainer.megatron.memory.memory_ranks import DEEP, EXPERTS
from tests.trainer.megatron.models import save_model
from tests.trainer.megatron.overlap_ranks import LAYOUTS
from tests.trainer.megatron.ranks import ALGORITHM
from trainer.backends.base import StepStats
from trainer.batch import Batch
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.megatron.backend import MegatronBackend

NAME = "qwen2"
CHANGED = slow_unless_changed(
    "trainer/megatron/", "trainer/optimizers/", "trainer/memory/", "trainer/backends/", "trainer/layers/",
    "tests/trainer/megatron/",
)  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(NAME, tmp_path_factory.mktemp("model"))


@CHANGED
@pytest.mark.xdist_group("layouts")  # one process forks the ranks of all
def test_overlapped_sums_of_gradients_change_no_bit(tmp_path: Path) -> None:
    for name in LAYOUTS:
        save_model(name, tmp_path)
    launch(2, "tests.trainer.megatron.overlap_ranks", str(tmp_path), logs=tmp_path / "logs")


@CHANGED
@pytest.mark.xdist_group("layouts")  # one process forks the ranks of all
def test_replicas_repeat_together_where_one_is_short_and_tensor_ranks_stop(
    model_dir: Path, tmp_path: Path
) -> None:
    for name in (DEEP, EXPERTS):
        save_model(name, model_dir.parent)
    launch(2, "tests.trainer.megatron.memory.memory_ranks", str(model_dir), logs=tmp_path)


SMOOTH = OptimizerConfig(lr=1e-3, adam_eps=1e-2)
"""Steps of about the gradient's size, so that what kernels add up in another order does not turn a sign."""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_that_runs_out_of_memory_repeats_the_step_with_the_smaller_budget(
    tmp_path: Path, dtype: str
) -> None:
    """The limit is torch's own, between the memory of the whole batch in one pass and that of half of it."""
    model = make_files(tmp_path, "small").model
    batch = batch_of(LongTail(16, prompt=512, mean=512, longest=1024), ALGORITHM, vocabulary=WORDS)
    total = len(batch.tokens) - batch.totals.samples  # the last token of a sample is no input
    whole, _, most = _step_on_gpu(model, batch, dtype, total)
    assert whole.warnings == ()
    plain, expected, least = _step_on_gpu(model, batch, dtype, total // 2)
    assert least < 0.75 * most
    memory = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((least + most) / 2 / memory)
    try:
        repeated, found, _ = _step_on_gpu(model, batch, dtype, total)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    (warning,) = repeated.warnings
    assert f"out of memory with {total} tokens per micro-batch (CUDA out of memory" in warning
    assert f"repeated with {total // 2}," in warning
    assert repeated.micro_batches == plain.micro_batches > whole.micro_batches == 1
    assert repeated.loss == pytest.approx(plain.loss, rel=1e-3, abs=1e-6)
    assert repeated.grad_norm == pytest.approx(plain.grad_norm, rel=1e-3)
    rtol = 1e-4 if dtype == "float32" else 2**-7  # of a weight: a bit in half precision
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=rtol, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def _step_on_gpu(
    model_dir: Path, batch: Batch, dtype: str, tokens: int
) -> tuple[StepStats, dict[str, torch.Tensor], int]:
    """Make a step from the model's weights; returns also the new ones, and the memory that torch took."""
    backend = MegatronBackend(
        model_dir,
        parallel=ParallelConfig(),
        optimizer=SMOOTH,
        trainer=TrainerConfig(device="cuda", dtype=dtype, micro_batch_tokens=tokens),
        algorithm=ALGORITHM,
    )
    torch.cuda.reset_peak_memory_stats()
    stats = backend.train_step(batch)
    taken = torch.cuda.max_memory_reserved()
    weights = {name: tensor.cpu() for name, tensor in backend.export()}
    backend.close()
    del backend
    gc.collect()
    torch.cuda.empty_cache()
    return stats, weights, taken

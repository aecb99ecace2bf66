"""Tests the norm of gradients, and the factor of the loss in float16, alone and with a model."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from megatron.core.optimizer import clip_grads

from tests.trainer.checkpoints import save_part
from tests.trainer.megatron.models import (
    OPTIMIZER,
    make_batch,
    make_model,
    plain_logprobs,
    plain_loss,
    save_model,
)
from tests.trainer.megatron.plain import PlainTrainer
from tests.trainer.megatron.ranks import ALGORITHM
from trainer.batch import Batch
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.megatron.backend import MegatronBackend
from trainer.megatron.optimizer import LossScale

pytestmark = pytest.mark.xdist_group("megatron_backend")  # one fixture for the module

NAME = "qwen2"
STEPS = 3
HIGH = 2.0**30
"""A factor under which the gradients of these models overflow."""


class Attempts:
    """A step whose gradient is finite at `fits` and below."""

    def __init__(self, scale: LossScale, fits: float) -> None:
        self.scale, self.fits = scale, fits
        self.made: list[float] = []

    def __call__(self) -> tuple[str, float]:
        self.made.append(self.scale.value)
        return f"at {self.scale.value:g}", 1.0 if self.scale.value <= self.fits else float("inf")


def test_a_step_that_overflows_is_made_again_under_half_the_factor() -> None:
    scale = LossScale(OptimizerConfig(initial_loss_scale=64))
    attempts = Attempts(scale, fits=8)
    assert scale.repeated(attempts) == ("at 8", 3)
    assert attempts.made == [64, 32, 16, 8]
    assert scale.repeated(attempts) == ("at 8", 0)


def test_the_factor_grows_after_as_many_steps_as_the_window_has() -> None:
    scale = LossScale(OptimizerConfig(initial_loss_scale=64, loss_scale_window=3))
    attempts = Attempts(scale, fits=128)
    repeats = [scale.repeated(attempts)[1] for _ in range(7)]
    assert attempts.made == [64, 64, 64, 128, 128, 128, 256, 128]
    assert repeats == [0] * 6 + [1]


def test_a_gradient_that_is_never_finite_leaves_the_factor_as_it_was() -> None:
    scale = LossScale(OptimizerConfig(initial_loss_scale=4))
    attempts = Attempts(scale, fits=0)
    assert scale.repeated(attempts) == ("at 1", 2)
    assert (scale.value, attempts.made) == (4, [4, 2, 1])


def test_the_first_factor_is_a_power_of_two() -> None:
    assert LossScale(OptimizerConfig(initial_loss_scale=1000)).value == 1024


# -- with a model
@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_model(NAME, tmp_path_factory.mktemp("model"))


def backend_of(model_dir: Path, dtype: str = "float16", **optimizer: Any) -> MegatronBackend:
    return MegatronBackend(
        model_dir,
        parallel=ParallelConfig(),
        optimizer=replace(OPTIMIZER, **optimizer),
        trainer=TrainerConfig(device="cpu", dtype=dtype),
        algorithm=ALGORITHM,
    )


@pytest.fixture
def backend(model_dir: Path) -> Iterator[MegatronBackend]:
    made = backend_of(model_dir, initial_loss_scale=HIGH)
    yield made
    made.close()


def weights(backend: MegatronBackend) -> dict[str, torch.Tensor]:
    return dict(backend.export())


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class PlainHalf:
    """Hugging Face's model in float16, stepped through fp32 masters by torch's AdamW, under one factor."""

    def __init__(self, factor: float) -> None:
        self.oracle, self.factor = PlainTrainer(NAME, ALGORITHM), factor
        self.half = make_model(NAME).half()
        for master, parameter in zip(self.oracle.model.parameters(), self.half.parameters(), strict=True):
            master.data = parameter.data.float()

    def step(self, batch: Batch) -> None:
        loss = plain_loss(ALGORITHM, batch, *plain_logprobs(self.half, batch))
        (loss * self.factor).backward()
        pairs = list(zip(self.oracle.model.parameters(), self.half.parameters(), strict=True))
        for master, parameter in pairs:
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float() / self.factor, None
        torch.nn.utils.clip_grad_norm_(self.oracle.model.parameters(), OPTIMIZER.clip_grad)
        self.oracle.steps += 1
        for group in self.oracle.optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr * min(1.0, self.oracle.steps / OPTIMIZER.lr_warmup_steps)
        self.oracle.optimizer.step()
        for master, parameter in pairs:
            parameter.data = master.data.half()


def test_the_norm_of_many_gradients_is_one_kernels_and_that_of_all_their_numbers(
    backend: MegatronBackend,
) -> None:
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(size, generator=generator) for size in (1, 7, 300, 4096)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = clip_grads.get_grad_norm_fp32(gradients)
    assert found == pytest.approx(np.linalg.norm(torch.cat(gradients).double().numpy()), rel=1e-6)
    called = Counter(event.name for event in profile.events())
    assert called["aten::_foreach_norm"] == called["aten::item"] == 1


def test_float16_trains_as_plain_torch_does_and_as_float32_within_rounding(model_dir: Path) -> None:
    backend = backend_of(model_dir)
    plain, exact = PlainHalf(1024.0), PlainTrainer(NAME, ALGORITHM)
    for step in range(STEPS):
        batch = make_batch(NAME, step)
        stats = backend.train_step(batch)
        plain.step(batch)
        wanted = exact.step(batch)
        assert (stats.skipped, stats.loss_scale_repeats) == ("", 0)
        assert stats.grad_norm == pytest.approx(wanted["grad_norm"], rel=2e-2)
        assert stats.loss == pytest.approx(wanted["loss"], abs=1e-2)
    found = weights(backend)
    backend.close()
    halves, floats = dict(plain.half.named_parameters()), exact.weights()
    for name, tensor in found.items():
        assert tensor.dtype is torch.float16
        torch.testing.assert_close(tensor, halves[name].detach(), atol=2e-3, rtol=2e-3, msg=name)
        torch.testing.assert_close(tensor.float(), floats[name], atol=3e-3, rtol=2e-3, msg=name)


def test_a_version_trains_its_batch_though_its_gradient_overflowed(
    backend: MegatronBackend, model_dir: Path
) -> None:
    batch = make_batch(NAME, 0)
    stats = backend.train_step(batch)
    assert (stats.skipped, backend._optimizer.steps) == ("", 1)
    assert stats.loss_scale_repeats > 0
    assert stats.loss_scale == HIGH / 2**stats.loss_scale_repeats
    fitting = backend_of(model_dir, initial_loss_scale=stats.loss_scale)
    assert fitting.train_step(batch) == msgspec.structs.replace(stats, loss_scale_repeats=0)
    assert same(weights(fitting), weights(backend))
    fitting.close()


def test_a_gradient_that_no_factor_makes_finite_skips_the_step(backend: MegatronBackend) -> None:
    batch = make_batch(NAME, 0)
    before = weights(backend)
    stats = backend.train_step(replace(batch, advantages=batch.advantages * float("inf")))
    assert stats.skipped.startswith("overflow: gradient norm")
    assert (stats.loss_scale, stats.loss_scale_repeats) == (1.0, 30)
    assert same(weights(backend), before)
    scale = backend._optimizer.loss_scale
    assert scale is not None
    assert scale.value == HIGH


def test_the_factor_is_in_the_checkpoint_and_the_host_steps_as_the_device(
    backend: MegatronBackend, model_dir: Path, tmp_path: Path
) -> None:
    backend.train_step(make_batch(NAME, 0))
    save_part(backend, tmp_path)
    host = backend_of(model_dir, cpu_offload=True)
    host.restore(tmp_path)
    last = [made.train_step(make_batch(NAME, 1)) for made in (backend, host)]
    assert last[0] == last[1]
    assert last[0].loss_scale_repeats == 0
    assert same(weights(host), weights(backend))
    host.close()


def test_a_run_goes_on_in_another_dtype(backend: MegatronBackend, model_dir: Path, tmp_path: Path) -> None:
    backend.train_step(make_batch(NAME, 0))
    save_part(backend, tmp_path)
    exact = backend_of(model_dir, "float32")
    exact.restore(tmp_path)
    assert all(torch.equal(t.half(), weights(backend)[name]) for name, t in weights(exact).items())
    assert exact.train_step(make_batch(NAME, 1)).loss_scale is None
    exact.close()

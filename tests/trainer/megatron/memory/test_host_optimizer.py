"""Tests that the optimizer in host memory gives the bits of the one on the device, and its checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import SettingsError
from protocol.weights.lora import NO_ADAPTERS
from tests.trainer.megatron.models import OPTIMIZER, save_model
from trainer.backends import host_transfers
from trainer.config import OptimizerConfig
from trainer.megatron.checkpoint.description import TrainedModel
from trainer.megatron.checkpoint.state import copy_part, restore_part
from trainer.megatron.families.reading import read_architecture
from trainer.megatron.layout import Layout
from trainer.megatron.memory.host_optimizer import HostOptimizer
from trainer.megatron.model import build_model, transformer_config
from trainer.megatron.optimizer import Optimizer, wrap_model
from trainer.megatron.parallel import Position
from trainer.storage.host_state import HostCopies

STEPS = 3
SMALL = 5000
"""Elements of a chunk, so that the model below has several."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_transfers, "CHUNK_ELEMENTS", SMALL)


class Trained:
    """A model with random weights, stepped on random gradients that depend on the step alone."""

    def __init__(
        self,
        kind: type[Optimizer],
        model_dir: Path,
        position: Position,
        dtype: torch.dtype,
        config: OptimizerConfig = OPTIMIZER,
    ) -> None:
        architecture = read_architecture(model_dir)
        settings = transformer_config(architecture, position, dtype)
        model = build_model(architecture, settings, position)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        (self.model,) = wrap_model(
            [model], settings, position, grad_reduce_in_fp32=config.grad_reduce_in_fp32
        )
        self.optimizer = kind(config, [self.model], position, dtype)

    def step(self, number: int, scale: float = 1.0) -> tuple[float, str]:
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 + number)
        for parameter in self.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.main_grad.copy_(noise * scale)
        return self.optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.model.module.named_parameters()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("clip", [0.5, 0.0])
@pytest.mark.parametrize("in_fp32", [True, False])
def test_host_optimizer_gives_the_bits_of_the_one_on_the_device(
    model_dir: Path, position: Position, dtype: torch.dtype, clip: float, in_fp32: bool
) -> None:
    config = replace(OPTIMIZER, clip_grad=clip, grad_reduce_in_fp32=in_fp32)
    both = [Trained(kind, model_dir, position, dtype, config) for kind in (Optimizer, HostOptimizer)]
    for number in range(STEPS):
        device, host = (trained.step(number) for trained in both)
        assert host == device
    assert equal(both[0].weights(), both[1].weights())


def test_gradients_are_added_up_in_the_type_that_is_asked_for(model_dir: Path, position: Position) -> None:
    config = replace(OPTIMIZER, grad_reduce_in_fp32=False)
    trained = Trained(HostOptimizer, model_dir, position, torch.bfloat16, config)
    assert {buffer.grad_data.dtype for buffer in trained.model.buffers} == {torch.bfloat16}


@pytest.mark.parametrize("first", [Optimizer, HostOptimizer])
def test_host_optimizer_continues_from_a_checkpoint_of_either(
    model_dir: Path, position: Position, tmp_path: Path, first: type[Optimizer]
) -> None:
    saved = Trained(first, model_dir, position, torch.bfloat16)
    saved.step(0)
    weights = dict(saved.model.module.named_parameters())
    architecture = read_architecture(model_dir)
    layout = Layout.of(position.config, architecture.layers)
    model = TrainedModel(architecture, layout, "bfloat16", NO_ADAPTERS, distributed=False)
    copy_part(HostCopies(), weights, saved.optimizer, model, 0).write(tmp_path)
    saved.step(1)
    restored = Trained(HostOptimizer, model_dir, position, torch.bfloat16)
    restore_part(tmp_path, dict(restored.model.module.named_parameters()), restored.optimizer, model, 0)
    restored.step(1)
    assert equal(restored.weights(), saved.weights())
    assert restored.optimizer.steps == 2


def test_an_infinite_gradient_changes_nothing(model_dir: Path, position: Position) -> None:
    trained = Trained(HostOptimizer, model_dir, position, torch.float32)
    before = trained.weights()
    norm, skipped = trained.step(0, scale=float("inf"))
    assert skipped == f"overflow: gradient norm {norm}"
    assert equal(before, trained.weights())
    assert trained.optimizer.steps == 0


def test_masters_and_moments_are_all_that_the_optimizer_holds(model_dir: Path, position: Position) -> None:
    trained = Trained(HostOptimizer, model_dir, position, torch.bfloat16)
    trained.step(0)
    held: list[Any] = [tensor for tensor in trained.optimizer.tensors() if tensor.ndim]
    count = sum(parameter.numel() for parameter in trained.model.parameters())
    assert sum(tensor.numel() for tensor in held) == 3 * count
    assert {tensor.dtype for tensor in held} == {torch.float32}


def test_an_engine_that_reads_the_masters_is_refused(model_dir: Path, position: Position) -> None:
    with pytest.raises(SettingsError, match=r"cpu_offload.*'shared'"):
        HostOptimizer(OPTIMIZER, [], position, torch.float32, separate_masters=True)

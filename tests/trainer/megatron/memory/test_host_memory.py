"""Tests the expected memory of a host against tensors that are there, and sizes worked out by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.weights.lora import LoraConfig
from tests.trainer.megatron.memory.test_expected import PARAMETERS_7B, QWEN_7B, workload
from tests.trainer.megatron.models import save_model
from trainer.backends import host_transfers
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.megatron.checkpoint.description import TrainedModel
from trainer.megatron.checkpoint.state import copy_part
from trainer.megatron.families.reading import read_architecture
from trainer.megatron.layout import Layout
from trainer.megatron.memory.expected import FrozenShape, Workload
from trainer.megatron.memory.host_memory import HostWorkload
from trainer.megatron.memory.host_optimizer import HostOptimizer
from trainer.megatron.model import DTYPES, build_model, transformer_config
from trainer.megatron.optimizer import wrap_model
from trainer.megatron.parallel import Position
from trainer.memory import host
from trainer.memory.expected import GIB
from trainer.memory.host import host_alternatives, host_refusal
from trainer.storage.host_state import HostCopies

OFFLOADED = OptimizerConfig(cpu_offload=True)
HOST = HostWorkload(work=workload(optimizer=OFFLOADED))


def on_ranks(hosts: int = 1, optimizer: OptimizerConfig = OFFLOADED, **parallel: Any) -> HostWorkload:
    work = workload(optimizer=optimizer, parallel=ParallelConfig(**parallel))
    return HostWorkload(work=work, hosts=hosts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_expected_bytes_are_those_of_the_tensors_that_are_there(
    tmp_path: Path, position: Position, dtype: str
) -> None:
    architecture = read_architecture(save_model("qwen2", tmp_path))
    settings = transformer_config(architecture, position, DTYPES[dtype])
    model = build_model(architecture, settings, position)
    (wrapped,) = wrap_model([model], settings, position)
    optimizer = HostOptimizer(OFFLOADED, [wrapped], position, DTYPES[dtype])
    for parameter in model.parameters():
        parameter.main_grad.fill_(1.0)
    optimizer.step()
    layout = Layout.of(ParallelConfig(), architecture.layers)
    names = dict(wrapped.module.named_parameters())
    described = TrainedModel(architecture, layout, dtype, LoraConfig(), distributed=False)
    (copies,) = copy_part(HostCopies(), names, optimizer, described, 0).tensors.values()
    work = Workload(
        architecture=architecture,
        parallel=ParallelConfig(),
        trainer=TrainerConfig(dtype=dtype),
        optimizer=OFFLOADED,
    )
    found = HostWorkload(work=work).expected()
    counts = sum(tensor.nbytes for tensor in optimizer.tensors() if tensor.ndim == 0)
    assert sum(tensor.nbytes for tensor in optimizer.tensors()) - counts == found.optimizer
    rooms = optimizer._transfers._gradient_buffers + optimizer._transfers._parameter_buffers
    assert found.transfers == 2 * sum(room.nbytes for room in rooms)  # one chunk, so one place of two
    parameters = sum(parameter.numel() for parameter in model.parameters())
    state = sum(
        tensor.nbytes for name, tensor in copies.items() if tensor.dtype == torch.float32 and tensor.ndim
    )
    assert state == found.checkpoint == 12 * parameters
    assert found.export == parameters * DTYPES[dtype].itemsize
    assert found.model == 0


def test_constants_are_those_of_what_they_describe() -> None:
    assert host.CHUNK_ELEMENTS == host_transfers.CHUNK_ELEMENTS


def test_a_host_holds_twelve_bytes_a_parameter_and_as_much_again_for_a_checkpoint() -> None:
    found = HOST.expected()
    assert found.optimizer == found.checkpoint == 12 * PARAMETERS_7B
    assert found.export == 2 * PARAMETERS_7B
    table = QWEN_7B.hidden * QWEN_7B.vocabulary
    assert found.transfers == 2 * table * (4 + 2)
    assert str(found) == ("190.5 GiB (optimizer 85.11, transfers 6.09, checkpoint 85.11, export 14.19)")


def test_ranks_of_a_host_share_what_is_distributed_and_copy_what_is_not() -> None:
    shared = on_ranks(data_parallel_size=4).expected()
    assert shared.optimizer == pytest.approx(12 * PARAMETERS_7B, abs=100)
    alike = on_ranks(data_parallel_size=4, use_distributed_optimizer=False).expected()
    assert alike.optimizer == 4 * 12 * PARAMETERS_7B
    assert alike.checkpoint == 12 * PARAMETERS_7B  # the first of them writes it


def test_hosts_divide_the_ranks_and_the_export() -> None:
    whole = on_ranks(pipeline_model_parallel_size=2).expected()
    half = on_ranks(hosts=2, pipeline_model_parallel_size=2).expected()
    assert half.export == whole.export / 2
    assert half.optimizer == pytest.approx(whole.optimizer / 2, rel=1e-6)  # but for the last norm
    other = HostWorkload(work=workload(parallel=ParallelConfig(data_parallel_size=2)), hosts=2)
    assert other.expected().checkpoint == pytest.approx(6 * PARAMETERS_7B, abs=100)


def test_state_that_leaves_the_gpu_in_turns_is_on_the_host_and_on_a_cpu_everything_is() -> None:
    device = HostWorkload(work=workload())
    assert device.expected().model == 0
    assert replace(device, turns=True).expected().model == (2 + 12) * PARAMETERS_7B
    assert replace(device, on_gpu=False).expected().model == (2 + 4 + 12) * PARAMETERS_7B
    assert replace(HOST, turns=True).expected().model == 2 * PARAMETERS_7B


def test_adapters_take_little() -> None:
    adapters = replace(HOST, work=workload(optimizer=OFFLOADED, adapters=LoraConfig(rank=8)))
    found = adapters.expected()
    assert found.total < found.export + GIB
    assert found.export == 2 * PARAMETERS_7B


def test_host_memory_that_suffices_is_not_refused() -> None:
    assert host_refusal(HOST, HOST.expected().total, "has") == ""


def test_a_refusal_names_both_sizes_and_settings_that_fit() -> None:
    text = host_refusal(HOST, 128 * GIB, "has free")
    assert text.startswith(
        f"the trainer's 1 rank(s) on a host are expected to take {HOST.expected()} of its memory, "
        "and this host has free 128.0 GiB; it would fit with optimizer.cpu_offload = false (99.3 GiB, and at "
    )
    replicas = on_ranks(data_parallel_size=4, use_distributed_optimizer=False)
    named = [name for name, _ in host_alternatives(replicas, 300 * GIB)]
    assert named == [
        "parallel.use_distributed_optimizer = true", "optimizer.cpu_offload = false", "cluster.nodes = 2",
    ]  # fmt: skip
    assert [name for name, _ in host_alternatives(replace(replicas, on_gpu=False), 400 * GIB)] == [
        "parallel.use_distributed_optimizer = true", "cluster.nodes = 2",
    ]  # fmt: skip


def test_more_hosts_and_adapters_are_named_where_nothing_fits() -> None:
    assert "no setting of its ranks would fit: spread them" in host_refusal(HOST, 50 * GIB, "has")


def test_frozen_models_rest_where_the_setting_says() -> None:
    def model(*, offload: bool, turns: bool = False) -> int:
        work = replace(HOST.work, frozen=(FrozenShape(QWEN_7B, offload),) * 2)
        return replace(HOST, work=work, turns=turns).expected().model

    assert model(offload=True) == 2 * 2 * PARAMETERS_7B
    assert model(offload=False) == 0
    assert model(offload=False, turns=True) == model(offload=True, turns=True) == 3 * 2 * PARAMETERS_7B


def test_a_critic_takes_as_much_again_but_is_not_exported() -> None:
    critic = replace(HOST.work.architecture, value_head=True)
    both = replace(HOST, work=replace(HOST.work, critic=critic)).expected()
    alone = HOST.expected()
    assert both.export == alone.export
    for kind in ("optimizer", "checkpoint"):
        assert 1.9 < getattr(both, kind) / getattr(alone, kind) < 2

"""Tests the expected memory of a host with sharded models against tensors that are there."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.fsdp.memory.test_expected import SIZE, workload
from tests.trainer.fsdp.ranks import make_backend
from tests.trainer.megatron.models import OPTIMIZER, make_batch, save_model
from trainer.config import TrainerConfig
from trainer.fsdp.memory.expected import FLOAT32, read_size
from trainer.fsdp.memory.host_memory import ShardedHost
from trainer.memory.expected import GIB
from trainer.memory.host import STATE_BYTES, host_alternatives, host_refusal

OFFLOADED = replace(OPTIMIZER, cpu_offload=True)


@pytest.mark.parametrize("held", [False, True])
def test_expected_bytes_are_those_of_the_tensors_that_are_there(tmp_path: Path, held: bool) -> None:
    model_dir = save_model("qwen2", tmp_path)
    backend = make_backend(model_dir, optimizer=OFFLOADED, offload_parameters=held)
    backend.train_step(make_batch("qwen2", 0))
    stepper, (copies,) = backend._stepper, backend.copy_state().tensors.values()
    masters = [stepper.stepped(name) for name in stepper.masters]
    moments = [moment for one in masters for moment in stepper.optimizer.state[one].values() if moment.ndim]
    work = workload(
        model=read_size(model_dir),
        optimizer=OFFLOADED,
        trainer=TrainerConfig(dtype="float32", offload_parameters=held),
    )
    backend.close()
    found = ShardedHost(work=work).expected()
    own = 0 if held else sum(one.nbytes for one in masters)
    assert found.optimizer == own + sum(moment.nbytes for moment in moments)
    assert found.model == (2 * sum(one.nbytes for one in masters) if held else 0)
    assert found.checkpoint == sum(
        tensor.nbytes for tensor in copies.values() if tensor.is_floating_point() and tensor.ndim
    )
    assert (found.transfers == 0) == held


def test_hosts_divide_the_ranks_and_a_critic_takes_as_much_again() -> None:
    host = ShardedHost(work=workload(4, optimizer=OFFLOADED))
    alone, half = host.expected(), replace(host, hosts=2).expected()
    assert (half.optimizer, half.checkpoint, half.export) == (
        alone.optimizer / 2, alone.checkpoint / 2, alone.export / 2
    )  # fmt: skip
    both = replace(host, work=replace(host.work, critic=SIZE)).expected()
    assert (both.optimizer, both.export) == (2 * alone.optimizer, alone.export)
    on_cpu = ShardedHost(work=workload(), on_gpu=False).expected()
    assert on_cpu.model > (STATE_BYTES + FLOAT32) * SIZE.parameters


def test_a_refusal_names_both_sizes_and_settings_that_fit() -> None:
    host = ShardedHost(work=workload(4, optimizer=OFFLOADED, model=replace(SIZE, parameters=4 * GIB)))
    room = host.expected().total // 2 + GIB * 8
    assert host_refusal(host, host.expected().total, "has") == ""
    text = host_refusal(host, room, "has")
    assert "4 rank(s) on a host are expected to take" in text
    assert [name for name, _ in host_alternatives(host, room)] == [
        "optimizer.cpu_offload = false", "cluster.nodes = 2",
    ]  # fmt: skip
    on_device = dict(host_alternatives(host, room))["optimizer.cpu_offload = false"]
    assert on_device.work.optimizer == OPTIMIZER

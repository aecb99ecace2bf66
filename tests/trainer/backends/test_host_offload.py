"""Tests offloading: tensors return from the host bit for bit, and a full device is reported."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from protocol.errors import TetherError
from tests.trainer.reference.test_backend import batch
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.backends.host_offload import HostOffload
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.registry import make_backend

CPU = torch.device("cpu")


def test_views_and_storages_come_back_as_they_were_and_blank_ones_as_zeros() -> None:
    host, flat, scratch = HostOffload(CPU), torch.randn(10), torch.ones(6)
    view, before = flat[3:7], flat.clone()
    for _ in range(2):
        assert (
            host.offload([flat, view, scratch], blank=[scratch, scratch[2:]])
            == flat.nbytes + scratch.nbytes
            == host.nbytes
        )
        assert flat.untyped_storage().nbytes() == scratch.untyped_storage().nbytes() == 0
        assert host.in_use
        host.onload()
        host.onload()
        assert not host.in_use
        assert torch.equal(view, before[3:7])
        assert scratch.tolist() == [0.0] * 6
        flat.add_(1)
        before.add_(1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["reference", "megatron"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_leaves_the_gpu_and_comes_back_bit_for_bit(model_dir: Path, name: str, dtype: str) -> None:
    trained = [_trained(model_dir, name, dtype, between) for between in (lambda backend: None, _leave)]
    assert all(torch.equal(trained[0][tensor], trained[1][tensor]) for tensor in trained[0])


@pytest.mark.gpu
def test_a_device_without_room_is_named_and_nothing_has_changed() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    host = HostOffload(device)
    tensor = torch.full((1 << 30,), 3, dtype=torch.uint8, device=device)
    host.offload([tensor])
    taken = torch.empty(torch.cuda.mem_get_info()[0] - (1 << 29), dtype=torch.uint8, device=device)
    with pytest.raises(TetherError, match=r"the trainer's state takes 1024 MiB, \d+ MiB are free on cuda:0"):
        host.onload()
    assert tensor.untyped_storage().nbytes() == 0
    del taken
    torch.cuda.empty_cache()
    host.onload()
    assert bool((tensor == 3).all())


def _trained(model_dir: Path, name: str, dtype: str, between: Callable[..., None]) -> dict[str, torch.Tensor]:
    backend = make_backend(
        model_dir,
        parallel=ParallelConfig(),
        optimizer=OptimizerConfig(lr=1e-3),
        trainer=TrainerConfig(backend=name, dtype=dtype, micro_batch_size=2),
        algorithm=make_algorithm(AlgorithmConfig()),
    )
    for step in range(3):
        backend.train_step(batch(step, seed=step))
        between(backend)
    weights = {tensor: value.clone() for tensor, value in backend.export()}
    backend.close()
    return weights


def _leave(backend: "object") -> None:
    parameters = sum(value.numel() for _, value in backend.export())  # type: ignore[attr-defined]
    before = torch.cuda.memory_allocated()
    held = backend.offload()  # type: ignore[attr-defined]
    freed = before - torch.cuda.memory_allocated()  # what is left are the libraries' own buffers
    assert held >= 3 * 4 * parameters  # float32: the masters and both of Adam's moments
    assert freed > 0.9 * held
    backend.onload()  # type: ignore[attr-defined]

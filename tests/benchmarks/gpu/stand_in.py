"""For a rehearsal on a machine without a GPU: gloo in place of vLLM's NCCL communicator, files in place of
IPC handles, idle streams."""

import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.benchmarks.gpu.groups import broadcast, join_pair


class _Stream:
    def synchronize(self) -> None:
        pass


class _Communicator:
    """Speaks as vLLM's PyNcclCommunicator does where weights are broadcast."""

    def __init__(self, port: int, rank: int) -> None:
        self._group = join_pair(port, rank)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        broadcast(self._group, tensor)

    def destroy(self) -> None:
        self._group = None


def _to_file(tensor: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
    """As torch's `reduce_tensor` for memory of a GPU: what `_from_file` takes, the seventh of them a
    device."""
    with tempfile.NamedTemporaryFile(prefix="tether-bench-", delete=False) as file:
        file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return None, (file.name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), 0, 0, 0, 0)


def _from_file(name: str, dtype: str, shape: tuple[int, ...], *_: Any) -> torch.Tensor:
    """The tensor, once."""
    data = bytearray(Path(name).read_bytes())
    Path(name).unlink()
    return torch.frombuffer(data, dtype=getattr(torch, dtype)).view(shape)


def install() -> None:
    """Nothing where there is a GPU."""
    if torch.cuda.is_available():
        return
    from torch.multiprocessing import reductions
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor

    def init_group(
        master_address: str, master_port: int, rank: int, world_size: int, device: Any
    ) -> _Communicator:
        return _Communicator(master_port, rank)

    nccl_common.stateless_init_process_group = init_group
    packed_tensor._get_streams = lambda device, count: tuple(_Stream() for _ in range(count))
    torch.cuda.Stream = _Stream  # type: ignore[misc,assignment]
    torch.cuda.current_stream = lambda device=None: _Stream()  # type: ignore[assignment,return-value]
    torch.accelerator.current_device_index = lambda: 0  # type: ignore[assignment]
    torch.accelerator.synchronize = lambda: None  # type: ignore[assignment]
    torch.cuda.ipc_collect = lambda: None
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(uuid="none")  # type: ignore[assignment]
    reductions.reduce_tensor, reductions.rebuild_cuda_tensor = _to_file, _from_file  # type: ignore[assignment]
    torch.cuda.stream = lambda stream: nullcontext()  # type: ignore[assignment,return-value,misc]

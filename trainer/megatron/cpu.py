"""Patches the places where megatron-core assumes CUDA, only on machines without CUDA.

Import this module before megatron-core.

Except for `cuda_type_names`, the patches affect only calls that raise without CUDA. Other code in the process
is not affected.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")
_installed = False


def _import_uncompiled() -> None:
    """Import megatron-core without `torch.compile` if there is no CUDA.

    megatron-core decorates fused kernels with `torch.compile` at import. The decorator imports torch's
    compiler, which takes as long as all other imports of a rank, for kernels that do not run on a CPU.
    """
    if torch.cuda.is_available():
        return
    # megatron-core recommends a CUDA variable, on each rank
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS", category=UserWarning)
    compile_function = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        import megatron.core  # noqa: F401
    finally:
        torch.compile = compile_function


def install() -> None:
    """Patch torch for megatron-core, once, if there is no CUDA. Call before building a model."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    # Communication and gradient buffers are created on the "current device".
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    # Called around point-to-point communication; gloo's requests have their own waits.
    torch.cuda.synchronize = lambda *args, **kwargs: None
    # The tied output layer of the last pipeline stage is moved to the GPU before its all-reduce.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    # torch lists its factories when a device context is first used. Listing patched factories would break
    # contexts such as `with torch.device("meta")`, in which transformers loads models.
    _device_constructors()
    # Token counters, loss scales and norms are created with device="cuda".
    for name in ("zeros", "ones", "empty", "tensor"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # Sequence parallelism forks the CUDA random state around the layers.
    import megatron.core.tensor_parallel.random as megatron_random

    megatron_random._CUDA_RNG_STATE_TRACKER = _NoRandomStates()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    # Recomputing restores the CUDA random state of the first pass.
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0)
    megatron_random._set_cuda_rng_state = lambda *args, **kwargs: None


@contextmanager
def cuda_type_names() -> Iterator[None]:
    """Make `Tensor.type()` return the names of CUDA types within the block.

    megatron's optimizers sort their parameters by these names at construction.
    """
    if torch.cuda.is_available():
        yield
        return
    original: Callable[..., Any] = torch.Tensor.type

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = named  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return create


class _NoRandomStates:
    """Stub for the CUDA random state tracker, which models without dropout do not need."""

    def fork(self, name: str = "") -> AbstractContextManager[None]:
        return nullcontext()

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, torch.Tensor]:
        return {}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Ignore the states: models without dropout use none."""


_import_uncompiled()

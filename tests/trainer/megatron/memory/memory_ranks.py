"""Gives a model less memory than it has: passes of more tokens than a limit raise torch's own error.

As a module it is one of two ranks: two replicas of which the second is short of memory, then two tensor
ranks that both are. Each layout, and that of two context ranks, also saves memory by settings, which changes
no bit.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from protocol.errors import SettingsError
from tests.trainer.megatron.models import OPTIMIZER, make_batch
from tests.trainer.megatron.ranks import ALGORITHM, part_of
from trainer.backends.base import StepStats
from trainer.config import ParallelConfig, TrainerConfig
from trainer.megatron.backend import MegatronBackend

LIMIT = 20
DEEP = "qwen3-deep"
"""Name of a model beside the other, with layers enough for `CHUNKS`."""
EXPERTS = "qwen3-moe"
"""Name of another one, with experts."""
CHUNKS = ParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)


def limit_forward(backend: MegatronBackend, tokens: int) -> None:
    """In the second layer, when the first one's activations are kept."""

    def check(module: torch.nn.Module, inputs: Any, options: dict[str, Any]) -> None:
        check_size(options["hidden_states"].size(0), tokens)

    layer = backend._runner._inner[0].decoder.layers[1]
    layer.register_forward_pre_hook(check, with_kwargs=True)


def limit_backward(backend: MegatronBackend, tokens: int) -> None:
    """In the backward pass, when the second layer has added its gradients already."""

    def check(gradient: torch.Tensor) -> None:
        check_size(gradient.size(0), tokens)

    def watch(module: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, Any]) -> None:
        if output[0].requires_grad:
            output[0].register_hook(check)

    backend._runner._inner[0].decoder.layers[0].register_forward_hook(watch)


def check_size(found: int, limit: int) -> None:
    """Raise torch's own error if a pass has too many tokens."""
    if found > limit:
        raise torch.OutOfMemoryError(f"out of memory: a pass of {found} tokens. There are {limit}")


def _make(
    model_dir: Path, parallel: ParallelConfig, tokens: int, *, cpu_offload: bool = False, recompute: str = ""
) -> MegatronBackend:
    return MegatronBackend(
        model_dir,
        parallel=parallel,
        optimizer=dataclasses.replace(OPTIMIZER, cpu_offload=cpu_offload),
        trainer=TrainerConfig(device="cpu", micro_batch_tokens=tokens, recompute_granularity=recompute),
        algorithm=ALGORITHM,
    )


def _step(backend: MegatronBackend, model: str = "qwen2") -> StepStats:
    return backend.train_step(part_of(backend, make_batch(model, 0)))


def _save_memory(model_dir: Path, parallel: ParallelConfig, model: str = "qwen2") -> None:
    """Settings that save memory change no bit."""
    plain = _make(model_dir, parallel, 1000)
    saving = _make(model_dir, parallel, 1000, cpu_offload=True, recompute="full")
    for _ in range(2):
        assert _step(saving, model) == _step(plain, model)
    _check_equal(saving, plain)
    plain.close()
    saving.close()


def _check_equal(one: MegatronBackend, other: MegatronBackend) -> None:
    for name, tensor in one._parameters.items():
        assert torch.equal(tensor, other._parameters[name]), name


def main(model_dir: Path) -> None:
    torch.set_num_threads(1)
    replicas = ParallelConfig(data_parallel_size=2)
    short = _make(model_dir, replicas, 1000)
    if dist.get_rank() == 1:
        limit_forward(short, LIMIT)
    repeated = _step(short)
    small = _make(model_dir, replicas, short._passes.tokens)
    plain = _step(small)
    assert "out of memory with 1000 tokens" in repeated.warnings[0], repeated.warnings
    assert plain == msgspec.structs.replace(repeated, warnings=()), (plain, repeated)
    _check_equal(short, small)
    short.close()
    small.close()
    _save_memory(model_dir, replicas)
    _save_memory(model_dir, ParallelConfig(context_parallel_size=2))

    layout = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    _save_memory(model_dir, layout)
    _save_memory(model_dir.parent / DEEP, CHUNKS)
    experts = model_dir.parent / EXPERTS
    _save_memory(experts, replicas, EXPERTS)
    apart = dataclasses.replace(replicas, expert_model_parallel_size=2, use_distributed_optimizer=False)
    _save_memory(experts, apart, EXPERTS)
    shared = _make(experts, dataclasses.replace(replicas, expert_tensor_parallel_size=2), 1000)
    limit_forward(shared, LIMIT)
    with pytest.raises(SettingsError, match=r"a rank cannot leave its passes here"):
        _step(shared, EXPERTS)
    shared.close()

    tensor = _make(model_dir, layout, 1000)
    limit_forward(tensor, LIMIT)
    with pytest.raises(
        SettingsError, match=r"the step cannot be repeated: lower trainer\.micro_batch_tokens"
    ):
        _step(tensor)
    tensor.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

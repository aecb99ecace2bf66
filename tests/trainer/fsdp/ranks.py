"""Trains sharded models on several ranks, saves, restores and publishes; rank 0 writes down the results."""

import faulthandler
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import Qwen3Config

from protocol.errors import SettingsError
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from tests.trainer.exports import export_by_rank
from tests.trainer.fsdp.sharing import write_results
from tests.trainer.fsdp.tiny_models import save_tiny
from tests.trainer.lora.oracle import LORA
from tests.trainer.lora.oracle import STEPS as ADAPTER_STEPS
from tests.trainer.megatron.launch import DEADLINE_S
from tests.trainer.megatron.memory.memory_ranks import check_size
from tests.trainer.megatron.models import OPTIMIZER, make_batch, step_batch
from tests.trainer.megatron.ranks import (
    ALGORITHM,
    STEPS,
    checkpoint_in,
    part_of,
    publish_pieces,
    train_and_restore,
    whole,
    write,
)
from tests.trainer.megatron.trees import make_tree
from tests.trainer.recomputed.ranks import process_group
from trainer.backends import host_transfers
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.fsdp.backend import FsdpBackend, join_mesh
from trainer.fsdp.loading import load_shards
from trainer.lora import save_adapter
from trainer.reference.frozen import load_model
from trainer.reference.shards import local_tensor

MODELS = ("qwen2", "qwen2-tied", "qwen3-moe", "gpt-oss")
"""One of each: plain, tied, experts that the checkpoint has one by one, experts that it has joined."""
SHARING = {"qwen2": "", "qwen3-moe": "full", "gpt-oss": ""}
"""Models whose samples begin alike -> what their backward passes compute again. gpt-oss has windows
and sinks."""
SEEDS = (0, 1)
"""Seeds of the random trees."""
SHARDED = {
    **{f"fsdp-{ranks}": ParallelConfig(data_parallel_size=ranks) for ranks in (1, 2, 3)},
    "fsdp-tp2": ParallelConfig(tensor_model_parallel_size=2),
    "fsdp-tp2-dp2": ParallelConfig(tensor_model_parallel_size=2, data_parallel_size=2),
}
"""Layouts by their names."""
MOVED = ("qwen2", "qwen3-moe")
"""Models whose checkpoints another layout continues."""
DIVIDED = ("qwen2", "qwen3-tied", "qwen3-moe", "olmo2", "deepseek-v3")
"""Models of layouts with tensor-parallel ranks: norms of divided heads, experts that are joined, outputs that
are gathered, attention that is whole."""
FROM = {"fsdp-tp2": "fsdp-2", "fsdp-tp2-dp2": "fsdp-tp2"}
"""Layout -> the one whose checkpoints it continues, too; that one is launched before."""
BFLOAT16 = "llama"
ADAPTED = ("qwen3-tied", "olmo2", "deepseek-v3")
"""Models with adapters; on tensor-parallel ranks all: outputs that are gathered, attention that is whole."""
DROPPED = replace(LORA, dropout=0.3)
RECOMPUTED = "qwen3-moe"
"""Has norms whose gradients tensor-parallel ranks add up."""
OFFLOADS = {"optimizer": False, "parameters": True}
"""Part that is in host memory -> `trainer.offload_parameters`, both with `optimizer.cpu_offload`."""
OFFLOADED = "qwen3-moe"
SMALL = 5000
"""Elements that the optimizer in host memory steps at a time, so that the model takes several."""


def make_backend(
    model_dir: Path,
    layout: str = "fsdp-1",
    dtype: str = "float32",
    *,
    adapters: LoraConfig = NO_ADAPTERS,
    optimizer: OptimizerConfig = OPTIMIZER,
    **trainer: object,
) -> FsdpBackend:
    sizes = {"micro_batch_tokens": 40, "micro_batch_size": 7, **trainer}
    settings = TrainerConfig(dtype=dtype, device="cpu", **sizes)  # type: ignore[arg-type]
    return FsdpBackend(
        model_dir,
        parallel=SHARDED[layout],
        optimizer=optimizer,
        trainer=settings,
        algorithm=ALGORITHM,
        adapters=adapters,
    )


def limit_forward(backend: FsdpBackend, tokens: int) -> None:
    """In the second layer, when the first one's activations are kept."""

    def check(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        check_size(inputs[0].size(1), tokens)

    module: Any = backend._model.module
    module.model.layers[1].register_forward_pre_hook(check)


def limit_backward(backend: FsdpBackend, tokens: int) -> None:
    """In the backward pass, when the second layer has added its gradients already."""

    def watch(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: check_size(gradient.size(1), tokens))

    module: Any = backend._model.module
    module.model.layers[0].register_forward_hook(watch)


def models_of(layout: str) -> tuple[str, ...]:
    """Names of the models that are trained in a layout."""
    return DIVIDED if SHARDED[layout].tensor_model_parallel_size > 1 else MODELS


def run(layout: str, models: Path, out: Path) -> None:
    torch.set_num_threads(1)
    with process_group(SHARDED[layout].world_size):
        for name in models_of(layout):
            _load(layout, models / name, out / name)
            make = partial(make_backend, models / name, layout)
            train_and_restore(name, make, models / name, out / name)
        if source := FROM.get(layout):
            for name in MOVED:
                _go_on(layout, out.parent / source / name / "after-one", models / name, out / name)
        _recompute(layout, models / RECOMPUTED, out / "recompute")
        for name, parameters in OFFLOADS.items():
            _offload(layout, models / OFFLOADED, out / "offload" / name, parameters=parameters)
        _sixteen_bits(layout, models / BFLOAT16, out / "bfloat16")
        for name in SHARING.keys() & models_of(layout):
            _share(name, layout, models / name, out / "shared" / name)
        if models_of(layout) == DIVIDED:
            _leave_out(layout, models / ADAPTED[0], out)
            _fail(layout, out)
        for name in ADAPTED if models_of(layout) == DIVIDED else ADAPTED[:1]:
            _adapters(layout, models / name, out / "adapters" / name)


def _load(layout: str, model_dir: Path, out: Path) -> None:
    """Count the elements that each rank has of a model, whose parameters have no memory before."""
    out.mkdir(parents=True, exist_ok=True)
    blank = load_model(model_dir, "model.path", blank=True)
    assert all(parameter.is_meta for parameter in blank.parameters())
    mesh, _ = join_mesh(SHARDED[layout], TrainerConfig(device="cpu"))
    tensors, _ = load_shards(model_dir, "model.path", mesh, TrainerConfig(device="cpu"))
    sizes = {name: torch.tensor(local_tensor(tensor).numel()) for name, tensor in tensors.items()}
    for size in sizes.values():
        dist.all_reduce(size)
    if dist.get_rank() == 0:
        own = {name: local_tensor(tensor).numel() for name, tensor in tensors.items()}
        counts = {"sum": sum(map(int, sizes.values())), "own": sum(own.values())}
        (out / "loaded.json").write_text(json.dumps(counts))


def _go_on(layout: str, checkpoint: Path, model_dir: Path, out: Path) -> None:
    backend = make_backend(model_dir, layout)
    backend.restore(checkpoint)
    for step in range(1, STEPS):
        backend.train_step(part_of(backend, step_batch(model_dir.name, step)))
    write(out / "went-on", backend.export())


def _leave_out(layout: str, model_dir: Path, out: Path) -> None:
    """Train by a plan that does not add up the gradients of norms of heads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(Qwen3Config.base_model_tp_plan, "layers.*.self_attn.q_norm")
        backend = make_backend(model_dir, layout)
        before = dict(backend.export())
    with pytest.raises(SettingsError) as refused:
        backend.train_step(part_of(backend, step_batch(model_dir.name, 0)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.export())
    if dist.get_rank() == 0:
        (out / "left-out.txt").write_text(str(refused.value))


def _fail(layout: str, out: Path) -> None:
    """Load a model whose plan mixes divided and whole tensors."""
    if dist.get_rank() == 0:
        save_tiny("granite_swa", out)
    dist.barrier()
    with pytest.raises(SettingsError) as refused:
        make_backend(out / "granite_swa", layout)
    if dist.get_rank() == 0:
        (out / "failed.txt").write_text(str(refused.value))


def _recompute(layout: str, model_dir: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    backend = make_backend(model_dir, layout, recompute_granularity="full")
    for step in range(STEPS):
        backend.train_step(part_of(backend, step_batch(RECOMPUTED, step)))
    write(out / "after", backend.export())


def _offload(layout: str, model_dir: Path, out: Path, *, parameters: bool) -> None:
    """Train with the optimizer in host memory, from its own checkpoint and from the one that has it there."""
    out.mkdir(parents=True, exist_ok=True)
    optimizer, on_device = replace(OPTIMIZER, cpu_offload=True), out.parent.parent / OFFLOADED / "after-one"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_transfers, "CHUNK_ELEMENTS", SMALL)
        backend = make_backend(model_dir, layout, optimizer=optimizer, offload_parameters=parameters)
    for step in range(STEPS):
        backend.train_step(part_of(backend, step_batch(OFFLOADED, step)))
        if step == 0:
            checkpoint = checkpoint_in(backend, out / "after-one")
    write(out / "after", backend.export())
    if dist.get_world_size() > 1:
        publish_pieces(backend, out)
    for name, saved in (("restored", checkpoint), ("from-device", on_device)):
        backend.restore(saved)
        for step in range(1, STEPS):
            backend.train_step(part_of(backend, step_batch(OFFLOADED, step)))
        write(out / name, backend.export())


def _share(name: str, layout: str, model_dir: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for seed in SEEDS:
        for share in ("auto", "off"):
            backend = make_backend(
                model_dir, layout, share_prefixes=share, recompute_granularity=SHARING[name]
            )
            assert backend.shares_prefixes == (share == "auto")
            write_results(backend, make_tree(name, seed), out / f"{share}-{seed}")


def _sixteen_bits(layout: str, model_dir: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    backend = make_backend(model_dir, layout, "bfloat16")
    write(out / "before", backend.export())
    stats = backend.train_step(part_of(backend, make_batch(BFLOAT16, 0)))
    write(out / "after", [*backend.export(), ("norm", torch.tensor(stats.grad_norm))])


def _adapters(layout: str, model_dir: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    name, backend = model_dir.name, make_backend(model_dir, layout, adapters=LORA)
    backend.keep_reference()
    losses = []
    for step in range(ADAPTER_STEPS):
        losses.append(backend.train_step(part_of(backend, make_batch(name, step))).loss)
        if step == 0:
            checkpoint_in(backend, out / "after-one")
    write(out / "after", backend.export())
    export_by_rank(backend, out / "merged", model_dir)
    if dist.get_rank() == 0:
        save_adapter(load_file(out / "after.safetensors").items(), out / "peft", LORA, model_dir)
    batch = replace(make_batch(name, 0), temperature=1.0)
    write(out / "reference", [("first", whole(backend, batch, backend.reference_logprobs))])
    write(out / "logprobs", [("last", whole(backend, batch, backend.logprobs))])
    if dist.get_world_size() > 1:
        publish_pieces(backend, out)
    if dist.get_rank() == 0:
        (out / "losses.json").write_text(json.dumps(losses))
    if source := FROM.get(layout):
        saved = out.parents[2] / source / "adapters" / name / "after-one"
        if saved.exists():
            backend.restore(saved)
            for step in range(1, ADAPTER_STEPS):
                backend.train_step(part_of(backend, make_batch(name, step)))
            write(out / "went-on", backend.export())
    dropping = make_backend(model_dir, layout, adapters=DROPPED, recompute_granularity="full")
    for step in range(ADAPTER_STEPS):
        dropping.train_step(part_of(dropping, make_batch(name, step)))
    write(out / "dropped", dropping.export())


if __name__ == "__main__":
    faulthandler.dump_traceback_later(DEADLINE_S - 20, exit=True)
    run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))

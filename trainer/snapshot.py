"""A backend's weights as a Hugging Face directory, for AutoModelForCausalLM, vLLM, SGLang and the hub."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist

from protocol.errors import SettingsError
from trainer.backend import Backend
from trainer.weights.versions import sync

SHARD_BYTES = 4 << 30
COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
"""What a model directory holds besides weights."""


def save_hf(backend: Backend, model_dir: Path, out_dir: Path, *, dtype: str = "", shard_bytes: int = SHARD_BYTES) -> None:
    """Export the current weights to `out_dir`, with configuration and tokenizer of `model_dir`. Called on every rank; rank 0 writes.

    Written aside and renamed: `out_dir` is complete or not there.

    Args:
        backend: what to export.
        model_dir: the directory that training began with.
        out_dir: must not exist yet.
        dtype: float32 or bfloat16; by default the one that the backend exports. config.json says it, too.
        shard_bytes: largest file of weights.

    Raises:
        SettingsError: `out_dir` exists, or `dtype` is unknown. Rank 0 raises it after its part in the collective.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        for _ in backend.export():
            raise RuntimeError("only rank 0 gets tensors from an export")
        return
    tensors = backend.export()
    try:
        if out_dir.exists():
            raise SettingsError(f"{out_dir} exists: give a new directory")
        if dtype not in ("", "float32", "bfloat16"):
            raise SettingsError(f"dtype {dtype!r}: use float32 or bfloat16")
        aside = out_dir.with_name(out_dir.name + ".tmp")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        written = _write_shards(_converted(tensors, dtype), aside, shard_bytes)
        _copy_rest(model_dir, aside, written)
        for path in (*aside.iterdir(), aside):
            sync(path)
        aside.rename(out_dir)
        sync(out_dir.parent)
    finally:
        for _ in tensors:
            pass


def _converted(tensors: Iterator[tuple[str, torch.Tensor]], dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies on the host, in `dtype`; what is not a floating-point number keeps its own."""
    for name, tensor in tensors:
        kind = getattr(torch, dtype) if dtype and tensor.is_floating_point() else tensor.dtype
        yield name, torch.empty(tensor.shape, dtype=kind).copy_(tensor)


def _write_shards(tensors: Iterator[tuple[str, torch.Tensor]], directory: Path, shard_bytes: int) -> str:
    """Write one file, or several with an index; holds one shard in memory. Returns the floating-point dtype."""
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    size = total = 0
    written = ""

    def flush() -> None:
        safetensors.torch.save_file(shard, directory / f"shard_{len(shards):05d}", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if shard and size + nbytes > shard_bytes:
            flush()
            size = 0
        shard[name] = tensor
        size, total = size + nbytes, total + nbytes
        written = str(tensor.dtype).removeprefix("torch.") if tensor.is_floating_point() else written
    flush()
    _name_shards(directory, shards, total)
    return written


def _name_shards(directory: Path, shards: list[list[str]], total: int) -> None:
    if len(shards) == 1:
        (directory / "shard_00000").rename(directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard_{index:05d}").rename(directory / file)
        weight_map.update(dict.fromkeys(names, file))
    index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=1, sort_keys=True))


def _copy_rest(model_dir: Path, directory: Path, dtype: str) -> None:
    for path in sorted({path for pattern in COPIED for path in model_dir.glob(pattern) if path.is_file()}):
        shutil.copyfile(path, directory / path.name)
    config = directory / "config.json"
    if config.is_file():
        values = json.loads(config.read_text())
        for key in ("dtype", "torch_dtype"):
            if key in values:
                values[key] = dtype
        config.write_text(json.dumps(values, indent=2, sort_keys=True))

"""Writes weights as a Hugging Face directory, for transformers, vLLM, SGLang and the hub."""

import json
import re
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import safetensors.torch
import torch
from safetensors import safe_open

from protocol.host.atomic_file import directory_written_aside
from trainer.storage.checksums import write_checksums

SHARD_BYTES = 4 << 30
"""Default bound of the tensors in one file."""
COPIED = (
    "*.py",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
"""Files of the source that an export copies."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_FURTHER = re.compile(r"(?:model\.)?mtp(?:_layers)?\.")


def write_hf(
    tensors: Iterator[tuple[str, torch.Tensor]],
    directory: Path,
    source: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write weights, configuration, tokenizer and checksums, so that `directory` is complete or as it was.

    The `further_layers` of the source are written, too, as they are there.

    Args:
        tensors: of the whole model by their Hugging Face names, in host memory.
        directory: replaced if it exists.
        source: the model directory that training began with; its config.json gets the dtype of the tensors.
        shard_bytes: bound of the tensors in one file; a larger tensor has a file to itself.
    """
    with directory_written_aside(directory) as aside:
        written = _write_shards(chain(further_layers(source), tensors), aside, shard_bytes)
        _copy_rest(source, aside, written)
        write_checksums(aside)


def further_layers(source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint's layers that predict further tokens (MTP), which no trainer loads.

    These are layers after the last one that config.json counts, and those under `mtp`.
    """
    config = source / "config.json"
    layers = json.loads(config.read_text()).get("num_hidden_layers") if config.is_file() else None
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                layer = _LAYER.match(name)
                if _FURTHER.match(name) or (layer and layers is not None and int(layer[1]) >= layers):
                    yield name, file.get_tensor(name)


def _write_shards(tensors: Iterator[tuple[str, torch.Tensor]], directory: Path, shard_bytes: int) -> str:
    """Write one file, or several with an index, holding one shard in memory; returns the dtype."""
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
    """Give the files the names that transformers expects of so many; `total` is the bytes of all tensors."""
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


def _copy_rest(source: Path, directory: Path, dtype: str) -> None:
    """Copy configuration and tokenizer, and write the exported dtype into the configuration."""
    for path in sorted({path for pattern in COPIED for path in source.glob(pattern) if path.is_file()}):
        shutil.copyfile(path, directory / path.name)
    config = directory / "config.json"
    if config.is_file():
        values = json.loads(config.read_text())
        for key in ("dtype", "torch_dtype"):
            if key in values:
                values[key] = dtype
        config.write_text(json.dumps(values, indent=2, sort_keys=True))

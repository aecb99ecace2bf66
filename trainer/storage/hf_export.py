"""Writes weights as a Hugging Face directory, for transformers, vLLM, SGLang and the hub.

Each rank writes its tensors to separate files; rank 0 then renames these and adds the other files:

    PARENT/.NAME.shards/00003_00000.safetensors    first file of rank 3
    PARENT/NAME/model-00004-of-00008.safetensors   the same file, once all files exist
"""

import json
import math
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import safe_open

from protocol.host.atomic_file import directory_written_aside, sync
from trainer.storage.checksums import write_checksums

SHARD_BYTES = 4 << 30
"""Default limit of the tensors in one file, bytes."""
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
"""Files of the source model that an export copies."""
FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
"""Floating-point dtype in safetensors -> in config.json."""
EXTRA_LAYERS_RANK = 99_999
"""Pseudo-rank for files with untrained layers, which sort after all other files."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_MTP_TENSOR = re.compile(r"(?:model\.)?mtp(?:_layers)?\.")


@dataclass(frozen=True, slots=True)
class Shards:
    """One rank's tensors of an export, by Hugging Face name, in host memory."""

    tensors: Mapping[str, torch.Tensor]
    rank: int = 0

    def write(self, directory: Path) -> None:
        """Write the tensors into a directory of shards, created if it does not exist. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        write_shards(self.tensors.items(), directory, self.rank)


def write_hf(
    tensors: Iterable[tuple[str, torch.Tensor]],
    directory: Path,
    source: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model directory from one process, atomically.

    Args:
        tensors: tensors of the whole model by Hugging Face name, in host memory.
        directory: target, replaced if it exists.
        source: as in `finish_hf`.
        shard_bytes: as in `write_shards`.
    """
    shards = shards_of(directory)
    shutil.rmtree(shards, ignore_errors=True)
    shards.mkdir(parents=True)
    try:
        write_shards(tensors, shards, 0, shard_bytes)
        finish_hf(directory, source, shard_bytes)
    finally:
        shutil.rmtree(shards, ignore_errors=True)


def shards_of(directory: Path) -> Path:
    """Return the temporary directory for the ranks' shards of a model directory."""
    return directory.with_name(f".{directory.name}.shards")


def write_shards(
    tensors: Iterable[tuple[str, torch.Tensor]], shards: Path, rank: int, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a rank's tensors to files, with one file at a time in memory.

    Args:
        tensors: this rank's tensors by Hugging Face name, in host memory; other ranks have other names.
        shards: directory from `shards_of`, shared by the ranks.
        shard_bytes: limit of the tensors in one file, bytes; a larger tensor has a file to itself.

    Raises:
        OSError: a file cannot be written; the message names the file.
    """
    shard: dict[str, torch.Tensor] = {}
    size = count = 0

    def flush() -> None:
        path = shards / f"{rank:05d}_{count:05d}.safetensors"
        try:
            safetensors.torch.save_file(shard, path, metadata={"format": "pt"})
        except Exception as error:  # safetensors' own error, without the path
            raise OSError(f"{path}: {error}") from error
        sync(path)
        shard.clear()

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            flush()
            size, count = 0, count + 1
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        flush()


def finish_hf(directory: Path, source: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Make a model directory of all ranks' shards, with configuration and tokenizer.

    Also copies the `extra_layers` of the source, unless a rank has written them.

    Args:
        directory: target, replaced if it exists.
        source: directory of the initial model; the copy of its config.json gets the dtype of the tensors.
        shard_bytes: as in `write_shards`.
    """
    shards = shards_of(directory)
    files = sorted(shards.iterdir())
    write_shards(extra_layers(source, _names(files)), shards, EXTRA_LAYERS_RANK, shard_bytes)
    with directory_written_aside(directory) as aside:
        finish_shards(sorted(shards.iterdir()), aside, source, _dtype(files))
    shards.rmdir()


def finish_shards(files: Sequence[Path], directory: Path, source: Path, dtype: str = "") -> None:
    """Move files with all tensors of a model into a directory, and add configuration and tokenizer.

    Args:
        directory: existing, empty directory.
        source: as in `finish_hf`.
        dtype: dtype for config.json; default: dtype of most elements.
    """
    dtype = dtype or _dtype(files)
    _name_shards(files, directory)
    _copy_config_and_tokenizer(source, directory, dtype)
    write_checksums(directory)


def extra_layers(source: Path, trained: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint's multi-token prediction (MTP) layers, each once.

    These layers come after the layers counted in config.json, or are under `mtp`.

    Args:
        source: directory of the checkpoint.
        trained: names to skip because the model trains these tensors; a model's own code may load layers that
            other code does not.
    """
    config = source / "config.json"
    layers = json.loads(config.read_bytes()).get("num_hidden_layers") if config.is_file() else None
    seen = set(trained)
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                layer = _LAYER.match(name)
                is_further = layer and layers is not None and int(layer[1]) >= layers
                if (is_further or _MTP_TENSOR.match(name)) and name not in seen:
                    seen.add(name)
                    yield name, file.get_tensor(name)


def _names(files: Iterable[Path]) -> set[str]:
    """Return the tensor names in files."""
    names: set[str] = set()
    for path in files:
        with safe_open(str(path), framework="pt") as file:
            names.update(file.keys())
    return names


def _dtype(files: Iterable[Path]) -> str:
    """Return the dtype of most floating-point elements."""
    elements = dict.fromkeys(FLOATS, 0)
    for path in files:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                part = file.get_slice(name)
                if part.get_dtype() in elements:
                    elements[part.get_dtype()] += math.prod(part.get_shape())
    return FLOATS[max(elements, key=lambda name: elements[name])]


def _name_shards(files: Sequence[Path], directory: Path) -> None:
    """Move files into the directory, under the names that transformers expects."""
    if len(files) == 1:
        files[0].rename(directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    total = 0
    for index, path in enumerate(files):
        name = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        path.rename(directory / name)
        with safe_open(str(directory / name), framework="pt") as file:
            weight_map.update(dict.fromkeys(file.keys(), name))
        with (directory / name).open("rb") as raw:
            header = int.from_bytes(raw.read(8), "little")
            total += raw.seek(0, 2) - 8 - header
    index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=1, sort_keys=True))


def _copy_config_and_tokenizer(source: Path, directory: Path, dtype: str) -> None:
    """Copy configuration and tokenizer, and set the exported dtype in the configuration."""
    for path in sorted({path for pattern in COPIED for path in source.glob(pattern) if path.is_file()}):
        shutil.copyfile(path, directory / path.name)
    config = directory / "config.json"
    if config.is_file():
        values = json.loads(config.read_bytes())
        values.pop("quantization_config", None)
        for key in ("dtype", "torch_dtype"):
            if key in values:
                values[key] = dtype
        config.write_text(json.dumps(values, indent=2, sort_keys=True))

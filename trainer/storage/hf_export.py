"""Writes weights as a Hugging Face directory, for transformers, vLLM, SGLang and the hub.

Ranks write the tensors that they have into files of their own; rank 0 then names these and adds the rest:

    PARENT/.NAME.shards/00003_00000.safetensors    of rank 3, the first
    PARENT/NAME/model-00004-of-00008.safetensors   the same file, once all are there
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
FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
"""dtype of floating point in a safetensors file -> in config.json."""
FURTHER = 99_999
"""In place of a rank: files with the layers that no rank trains, after all others."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_FURTHER = re.compile(r"(?:model\.)?mtp(?:_layers)?\.")


@dataclass(frozen=True, slots=True)
class Shards:
    """One rank's tensors of an export, by their Hugging Face names, in host memory."""

    tensors: Mapping[str, torch.Tensor]
    rank: int = 0

    def write(self, directory: Path) -> None:
        """Write them into a directory of shards, which is made if it is not there. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        write_shards(self.tensors.items(), directory, self.rank)


def write_hf(
    tensors: Iterable[tuple[str, torch.Tensor]],
    directory: Path,
    source: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model directory from one process, so that it is complete or as it was.

    Args:
        tensors: of the whole model by their Hugging Face names, in host memory.
        directory: replaced if it exists.
        source: as for `finish_hf`.
        shard_bytes: as for `write_shards`.
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
    """Return the directory that ranks write the shards of a model directory to, which is empty or absent."""
    return directory.with_name(f".{directory.name}.shards")


def write_shards(
    tensors: Iterable[tuple[str, torch.Tensor]], shards: Path, rank: int, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a rank's tensors as files, with one of these in memory.

    Args:
        tensors: by their Hugging Face names, in host memory; no other rank writes these.
        shards: directory of `shards_of`, which the ranks share.
        rank: this rank's number.
        shard_bytes: bound of the tensors in one file; a larger tensor has a file to itself.

    Raises:
        OSError: a file cannot be written; names it.
    """
    shard: dict[str, torch.Tensor] = {}
    size = count = 0

    def flush() -> None:
        path = shards / f"{rank:05d}_{count:05d}.safetensors"
        try:
            safetensors.torch.save_file(shard, path, metadata={"format": "pt"})
        except Exception as error:  # safetensors' own, which says no path
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
    """Make the shards that all ranks have written a model directory, with configuration and tokenizer.

    The `further_layers` of the source are written, too, as they are there, unless a rank has written them.

    Args:
        directory: replaced if it exists.
        source: the model directory that training began with; its config.json gets the dtype of the tensors.
        shard_bytes: as for `write_shards`.
    """
    shards = shards_of(directory)
    files = sorted(shards.iterdir())
    write_shards(further_layers(source, _names(files)), shards, FURTHER, shard_bytes)
    with directory_written_aside(directory) as aside:
        finish_shards(sorted(shards.iterdir()), aside, source, _dtype(files))
    shards.rmdir()


def finish_shards(files: Sequence[Path], directory: Path, source: Path, dtype: str = "") -> None:
    """Move files with all of a model's tensors into a directory, and add configuration and tokenizer.

    Args:
        files: moved.
        directory: exists, and is empty.
        source: as for `finish_hf`.
        dtype: to be written into config.json; by default the dtype of most elements.
    """
    dtype = dtype or _dtype(files)
    _name_shards(files, directory)
    _copy_rest(source, directory, dtype)
    write_checksums(directory)


def further_layers(source: Path, trained: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint's layers that predict further tokens (MTP), each once.

    These are layers after the last one that config.json counts, and those under `mtp`.

    Args:
        source: the checkpoint.
        trained: names that are left out, as the model has these tensors itself: its own code may load layers
            that no other model loads.
    """
    config = source / "config.json"
    layers = json.loads(config.read_bytes()).get("num_hidden_layers") if config.is_file() else None
    seen = set(trained)
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                layer = _LAYER.match(name)
                is_further = layer and layers is not None and int(layer[1]) >= layers
                if (is_further or _FURTHER.match(name)) and name not in seen:
                    seen.add(name)
                    yield name, file.get_tensor(name)


def _names(files: Iterable[Path]) -> set[str]:
    """Return the names of the tensors in files."""
    names: set[str] = set()
    for path in files:
        with safe_open(str(path), framework="pt") as file:
            names.update(file.keys())
    return names


def _dtype(files: Iterable[Path]) -> str:
    """Return the dtype that most elements of floating point have."""
    elements = dict.fromkeys(FLOATS, 0)
    for path in files:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                part = file.get_slice(name)
                if part.get_dtype() in elements:
                    elements[part.get_dtype()] += math.prod(part.get_shape())
    return FLOATS[max(elements, key=lambda name: elements[name])]


def _name_shards(files: Sequence[Path], directory: Path) -> None:
    """Move files into the directory, under the names that transformers expects of so many."""
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


def _copy_rest(source: Path, directory: Path, dtype: str) -> None:
    """Copy configuration and tokenizer, and write the exported dtype and no other into the configuration."""
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

"""Writing a backend's weights as a Hugging Face checkpoint."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from trainer.backend import Backend

SHARD_BYTES = 4 << 30
"""A file is closed when it has grown to this size, so that no more than this is held in memory."""
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""Files beside the weights that an export takes over from the model that training began with."""


def save_hf(backend: Backend, directory: Path, *, source: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write config, tokenizer and weights. A collective: every rank calls it, rank 0 (the one that export yields on) writes.

    Args:
        directory: made if missing; an older export in it is overwritten.
        source: the model directory that training began with.
        shard_bytes: bound of the tensors in one file; a larger tensor has a file of its own.
    """
    files: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total = held = count = 0
    dtype = torch.float32

    def write() -> None:
        nonlocal held, count
        if not count:
            directory.mkdir(parents=True, exist_ok=True)
            for old in directory.glob("*.safetensors*"):
                old.unlink()
        count += 1
        file = f"model-{count:05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(shard, file))
        shard.clear()
        held = 0

    for name, tensor in backend.export():
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > shard_bytes:
            write()
        shard[name] = tensor.cpu().contiguous()
        held += size
        total += size
        dtype = tensor.dtype
    if not shard:
        return  # not the rank that export yields on
    write()
    if count == 1:
        (directory / "model-00001.safetensors").rename(directory / "model.safetensors")
    else:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    _copy_companions(source, directory, str(dtype).removeprefix("torch."))


def _copy_companions(source: Path, directory: Path, dtype: str) -> None:
    for name in COMPANIONS:
        if (source / name).exists() and source.resolve() != directory.resolve():
            shutil.copyfile(source / name, directory / name)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    path.write_text(json.dumps({**config, "dtype": dtype}, indent=2))

"""Writes a copy of a quantised checkpoint in 16 or 32 bits, which the run reads instead.

| `quant_method` | tensors of a file         | value of an element                         |
|----------------|---------------------------|---------------------------------------------|
| `fp8`          | X, X_scale_inv or X_scale | X times the scale of its tensor, row, block |
| `mxfp4`        | X_blocks, X_scales        | number of its 4 bits times 2^(scale - 127)  |

Products are computed in float32 and rounded once, to the dtype in config.json. Scales of activations are
dropped, because versions are published without them. The module does not import torch, because settings use
it.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from protocol.errors import SettingsError
from protocol.host.atomic_file import sync

if TYPE_CHECKING:
    import torch

Named = Iterator[tuple[str, "torch.Tensor"]]

FIELD = "quantization_config"
SCALES = ("_scale_inv", "_scale")
"""Suffixes of the names of a tensor's scales, in search order."""
ACTIVATION_SCALES = (".activation_scale", ".input_scale")
BLOCKS, EXPONENTS = "_blocks", "_scales"
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the 3 magnitude bits of e2m1; the fourth bit is the sign."""
BIAS = 127
"""Exponent bias of e8m0."""
ABANDONED_AFTER_S = 6 * 3600.0
"""Age, seconds, from which an incomplete copy counts as abandoned."""


def quantization_of(model_dir: Path) -> Mapping[str, Any] | None:
    """Return the quantisation section of config.json; None if it has none or cannot be read."""
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError):  # loading the model reports the error
        return None
    found = config.get(FIELD) if isinstance(config, dict) else None
    return found if isinstance(found, dict) else None


def write_plain(source: Path, directory: Path) -> None:
    """Write the copy of a quantised checkpoint, unless it exists.

    Raises:
        SettingsError: the method is unknown, a file is damaged, or a tensor does not fit the method. The
            message names the cause.
        OSError: the copy cannot be written.
    """
    from safetensors import SafetensorError

    from trainer.backends.safetensors_reader import SafetensorsReader
    from trainer.storage.hf_export import finish_shards, write_shards

    method = str((quantization_of(source) or {}).get("quant_method"))
    if method not in METHODS:
        raise SettingsError(
            f"{source}: {FIELD} says {method!r}; checkpoints of {' and '.join(METHODS)} are read. Use a copy "
            "in bfloat16, which transformers writes after loading with dequantize=True where it can"
        )
    if directory.exists():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned_copies(directory)
    with TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
        shards, aside = Path(scratch, "shards"), Path(scratch, "model")
        shards.mkdir()
        aside.mkdir()
        try:
            with SafetensorsReader(source) as reader:
                write_shards(METHODS[method](reader, _dtype_of(source)), shards, 0)
        except SafetensorError as error:
            raise SettingsError(f"{source}: {error}") from error
        finish_shards(sorted(shards.iterdir()), aside, source)
        for part in [*sorted(aside.rglob("*"), reverse=True), aside]:
            sync(part)
        try:
            aside.rename(directory)
        except OSError:  # another process was first; its copy may already be in use
            if not directory.exists():
                raise


def _remove_abandoned_copies(directory: Path) -> None:
    """Remove incomplete copies of killed processes."""
    for left in directory.parent.glob(f".{directory.name}.*"):
        with suppress(FileNotFoundError):  # its process has finished
            if time.time() - left.stat().st_mtime > ABANDONED_AFTER_S:
                shutil.rmtree(left, ignore_errors=True)


def _dtype_of(source: Path) -> "torch.dtype":
    import torch

    config = json.loads((source / "config.json").read_bytes())
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    dtype = getattr(torch, str(name), None)
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise SettingsError(
            f"{source}: config.json names the dtype {name!r}, in which no copy can be written"
        )
    return dtype


def _plain_fp8(reader: Any, dtype: "torch.dtype") -> Named:
    import torch

    block = (quantization_of(reader.model_dir) or {}).get("weight_block_size")
    scales = {name: name + end for name in reader.names for end in SCALES[::-1] if name + end in reader.names}
    for name in sorted(reader.names - {*scales.values()}):
        if name.endswith(ACTIVATION_SCALES):
            continue
        tensor = reader.whole(name)
        if name in scales:
            scale, place = reader.whole(scales[name]).float(), f"{reader.model_dir}: {name}"
            tensor = (tensor.float() * _spread(scale, tensor.shape, block, place)).to(dtype)
        elif tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise SettingsError(
                f"{reader.model_dir}: {name} is in 8 bits and has no scale ({name}{SCALES[0]})"
            )
        yield name, tensor


def _spread(scale: "torch.Tensor", shape: "torch.Size", block: list[int] | None, name: str) -> "torch.Tensor":
    """Return the scales of a tensor, its rows or its blocks, in a shape that broadcasts to the tensor."""
    if scale.numel() == 1 and len(shape) <= 2:
        return scale.reshape(())
    if scale.shape in (shape[:-1], (*shape[:-1], 1)):
        return scale.reshape(*shape[:-1], 1)
    if block and len(shape) > 1:
        (height, width), (rows, columns) = block, shape[-2:]
        if scale.shape == (*shape[:-2], -(-rows // height), -(-columns // width)):
            tall = scale.repeat_interleave(height, -2)[..., :rows, :]
            return tall.repeat_interleave(width, -1)[..., :columns]
    raise SettingsError(
        f"{name} has the shape {tuple(shape)} and scales of the shape {tuple(scale.shape)}, which are "
        f"neither one, nor of its rows, nor of blocks of {block}"
    )


def _plain_mxfp4(reader: Any, dtype: "torch.dtype") -> Named:
    import torch

    numbers = torch.tensor(FP4 + tuple(-number for number in FP4))
    for name in sorted(reader.names):
        tensor, base = reader.whole(name), name.removesuffix(BLOCKS)
        if name.endswith(EXPONENTS) and name.removesuffix(EXPONENTS) + BLOCKS in reader.names:
            continue
        if base == name:
            yield name, tensor
            continue
        if base + EXPONENTS not in reader.names:
            raise SettingsError(f"{reader.model_dir}: {name} has no {base}{EXPONENTS}")
        exponents = reader.whole(base + EXPONENTS)
        if tensor.dim() != 4 or exponents.shape != tensor.shape[:-1]:
            raise SettingsError(
                f"{reader.model_dir}: {name} has the shape {tuple(tensor.shape)}, its scales "
                f"{tuple(exponents.shape)}; expected are experts, rows, groups and bytes of a group"
            )
        plain = torch.empty(
            tensor.shape[0], tensor.shape[2] * tensor.shape[3] * 2, tensor.shape[1], dtype=dtype
        )
        for expert, bits in enumerate(tensor):
            values = numbers[torch.stack((bits & 15, bits >> 4), -1).int()].flatten(-2)
            scaled = torch.ldexp(values, exponents[expert].int()[..., None] - BIAS)
            plain[expert] = scaled.flatten(-2).T  # gpt-oss multiplies from the left
        yield base, plain


METHODS: Mapping[str, Callable[[Any, "torch.dtype"], Named]] = {
    "fp8": _plain_fp8,
    "mxfp4": _plain_mxfp4,
}
"""`quant_method` -> function that reads its tensors from a `SafetensorsReader`."""

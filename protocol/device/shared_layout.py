"""Names the sections of the files through which trainer and engine share tensors (transport `shared`).

The trainer's file describes its masters for the engine. The engine's file describes its live tensors for the
trainer.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # processes without tensors need only the names
    import torch

TRANSPORT = "shared"
"""Value of `weights.transport`."""
DESCRIPTION_KEY = "described"
"""Key in an engine's registration: path of the file that describes its tensors."""
SUFFIX = ".msgpack"
"""Suffix of description files."""

MASTERS = "masters"
"""Section of the trainer's file: fp32 masters by checkpoint name, laid out as in `matches_layout`. With
several ranks, each rank describes its shard."""
HELD, VERSION = "held", "version"
"""Section of the trainer's file, and its only entry: the version in the masters, or -1 while the trainer
writes to them."""
SUMS, PIECES = "sums", "pieces"
"""Section next to `HELD` if the trainer has several ranks, and its only tensor: the digest sums of the ranks'
pieces, concatenated in rank order, int64."""

PARAMETERS = "parameters"
"""Section of an engine's file: live weights by the trainer's parameter names. For `hf` and `vllm`, a tensor
is the part of a parameter that a checkpoint tensor fills; for `megatron`, a whole parameter."""
BUFFERS = "buffers"
"""Section of an engine's file: buffers by the engine's names."""
ROTARY = "cos_sin_cache"
"""Last component of the name of a buffer whose rows are cos and sin of a position's rotary angles, each in
half of the columns."""


def description_file(run_dir: Path, incarnation: str) -> Path:
    """Return the path of the file that describes the tensors of a process."""
    return run_dir / "shared" / f"{incarnation}{SUFFIX}"


def rank_file(file: Path, rank: int) -> Path:
    """Return the path for tensor-parallel rank `rank`, given the path of rank 0."""
    return file.with_name(f"{file.stem}.rank{rank}{SUFFIX}") if rank else file


def matches_layout(part: "torch.Tensor", shape: tuple[int, ...]) -> bool:
    """Return whether `part`, a view of a model's memory, holds a tensor of `shape`.

    Either `part` is contiguous and has this shape, or its rows are interleaved with other tensors in blocks.
    Then `part` is [blocks, rows per block, ...], and the concatenated rows of all blocks are the tensor's
    rows.
    """
    if part.ndim == len(shape):
        return tuple(part.shape) == shape and part.is_contiguous()
    return part.ndim == len(shape) + 1 > 1 and (part.shape[0] * part.shape[1], *part.shape[2:]) == shape

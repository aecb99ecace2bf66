"""Names the sections of the files by which trainer and engine share tensors (transport `shared`).

The trainer's file describes its masters for the engine, the engine's file its live tensors for the trainer.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # processes without tensors need the names alone
    import torch

TRANSPORT = "shared"
"""Value of `weights.transport`."""
DESCRIBED = "described"
"""Key in an engine's registration: the file that describes its tensors."""
SUFFIX = ".msgpack"
"""Suffix of a description's file name."""

MASTERS = "masters"
"""Section of the trainer's file: fp32 masters by checkpoint name, laid out as in `matches_layout`. Of several
ranks each has its parts."""
HELD, VERSION = "held", "version"
"""Section of the trainer's file, and the name of its one number: the version that the masters hold, or -1
while the trainer writes to them."""
SUMS, PIECES = "sums", "pieces"
"""Section beside `HELD` where the trainer has several ranks, and the name of its one tensor: the sums of the
pieces that they publish, one rank after the other, int64."""

PARAMETERS = "parameters"
"""Section of an engine's file: the live weights by the names of the trainer's parameters. For `hf` and `vllm`
each is the part of a parameter that a checkpoint tensor fills, for `megatron` a whole parameter."""
BUFFERS = "buffers"
"""Section of an engine's file: its buffers, by the engine's names."""
ROTARY = "cos_sin_cache"
"""Last component of the name of a buffer whose rows are cos and sin of the rotary angles of a position, in
half of the columns each."""


def description_file(run_dir: Path, incarnation: str) -> Path:
    """Return the file in which a process of a run describes its tensors."""
    return run_dir / "shared" / f"{incarnation}{SUFFIX}"


def rank_file(file: Path, rank: int) -> Path:
    """Return the file of another tensor rank beside that of rank 0."""
    return file.with_name(f"{file.stem}.rank{rank}{SUFFIX}") if rank else file


def matches_layout(part: "torch.Tensor", shape: tuple[int, ...]) -> bool:
    """Return whether `part`, of a model's memory, is a tensor of `shape`.

    Either it is dense and has that shape, or it is interleaved with others in blocks of rows: then it is
    [blocks, rows of a block, ...], and the rows of all blocks, in order, are the tensor's rows.
    """
    if part.ndim == len(shape):
        return tuple(part.shape) == shape and part.is_contiguous()
    return part.ndim == len(shape) + 1 > 1 and (part.shape[0] * part.shape[1], *part.shape[2:]) == shape

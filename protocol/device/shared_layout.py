"""What the files of the transport `shared` describe: the trainer's masters for the engine, the engine's live
tensors for the trainer."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # processes without tensors need the names alone
    import torch

TRANSPORT = "shared"
SUFFIX = ".msgpack"

MASTERS = "masters"
"""Section of the trainer's file: fp32, by checkpoint name; each is its tensor as `matches_layout` says."""
HELD, VERSION = "held", "version"
"""Section of the trainer's file with one number: the version that the masters are, -1 while they are written
to."""

PARAMETERS = "parameters"
"""Section of an engine's file: the live weights under the names that the trainer's model has for its
parameters. Of `hf` and `vllm` it is the part of a parameter that a checkpoint's tensor fills, of `megatron` a
whole parameter."""
BUFFERS = "buffers"
"""Section of an engine's file: what it computes with beside the weights, by the engine's own names."""
ROTARY = "cos_sin_cache"
"""Last part of the name of a buffer whose rows are cos and sin of the rotary angles of a position, half of
the columns each."""


def description_file(run_dir: Path, incarnation: str) -> Path:
    """Where a process of a run describes its tensors; its registration names the file."""
    return run_dir / "shared" / f"{incarnation}{SUFFIX}"


def matches_layout(part: "torch.Tensor", shape: tuple[int, ...]) -> bool:
    """Whether a part of a model's memory is a tensor of `shape`: it is dense and has it, or it is one of
    several that lie in turns.

    Then it has one dimension more: [turns, rows of a turn, ...], which are the tensor's rows one after the
    other.
    """
    if part.ndim == len(shape):
        return tuple(part.shape) == shape and part.is_contiguous()
    return part.ndim == len(shape) + 1 > 1 and (part.shape[0] * part.shape[1], *part.shape[2:]) == shape


DESCRIBED = "described"
"""What an engine writes into the registry: the file that describes its tensors."""

"""Compares log-probabilities with Hugging Face's, and exported tensors with the checkpoint's.

Shapes: t tokens of a batch.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from protocol.device.slice_digests import bits_of
from trainer.backends.safetensors_reader import SafetensorsReader
from trainer.batch import Batch

TOLERANCE = 1e-4
"""Allowed difference of a log-probability, relative to the larger of its size and 1."""
CONTEXT = 8
"""Number of tokens shown before a wrong token."""
BLOCK_ELEMENTS = 1 << 24
"""Number of elements of a checkpoint's tensor per read, unless a single row has more."""


@dataclass(frozen=True, slots=True)
class LogprobFindings:
    """Differences from the expected log-probabilities."""

    compared: int
    """Number of compared log-probabilities."""
    largest: float | None
    """Largest difference; None if a value is not finite."""
    difference: str
    """First difference over the tolerance, with its position; empty if there is none."""


@dataclass(frozen=True, slots=True)
class TensorFindings:
    """Differences of exported tensors from the checkpoint's tensors."""

    compared: int
    """Number of compared tensors."""
    dtypes: list[str]
    """Data types of the checkpoint's tensors."""
    ignored: list[str]
    """Tensors of the checkpoint that the model does not need."""
    difference: str
    """First difference, with its position; empty if there is none."""


def compare_logprobs(batch: Batch, found: torch.Tensor, expected: torch.Tensor) -> LogprobFindings:
    """Compare the log-probabilities (float32 [t]) of a batch's sampled tokens. NaN counts as a difference."""
    wanted = batch.sampled_mask
    apart = (found - expected).abs()
    wrong = wanted & ~(apart <= TOLERANCE * expected.abs().clamp(min=1))
    largest = float(apart[wanted].max()) if apart[wanted].isfinite().all() else None
    if not wrong.any():
        return LogprobFindings(int(wanted.sum()), largest, "")
    place = int(wrong.nonzero()[0])
    sample = int(batch.sample_index[place])
    start = int(batch.offsets[sample])
    before = batch.tokens[max(start, place - CONTEXT) : place].tolist()
    return LogprobFindings(
        int(wanted.sum()),
        largest,
        f"sample {sample}, token {place - start}: after {'... ' if place - start > CONTEXT else ''}{before} "
        f"token {int(batch.tokens[place])} has log-probability {float(found[place]):.9g}, by Hugging Face "
        f"{float(expected[place]):.9g}; so {int(wrong.sum())} of {int(wanted.sum())} tokens differ",
    )


def compare_tensors(
    exported: Iterable[tuple[str, torch.Tensor]],
    reader: SafetensorsReader,
    is_ignorable: Callable[[str], bool],
) -> TensorFindings:
    """Compare an export with the loaded checkpoint, bit for bit, after the dtype conversion of loading.

    Args:
        exported: the export. It is exhausted even after a difference, because other ranks take part in it.
        reader: reader of the checkpoint.
        is_ignorable: whether the model does not need the tensor with this name.
    """
    missing, dtypes, compared, difference = reader.names, set[str](), 0, ""
    for name, tensor in exported:
        compared += 1
        if name not in missing:
            difference = difference or f"{name} is exported twice, or is not in the checkpoint"
            continue
        missing.discard(name)
        dtype, found = _difference(name, tensor, reader)
        dtypes.add(dtype)
        difference = difference or found
    lost = sorted(name for name in missing if not is_ignorable(name))
    if lost:
        difference = difference or f"{lost[0]} of the checkpoint is not exported"
    return TensorFindings(compared, sorted(dtypes), sorted(missing - set(lost)), difference)


def _difference(name: str, tensor: torch.Tensor, reader: SafetensorsReader) -> tuple[str, str]:
    """Return the dtype of a checkpoint's tensor, and the first position where the exported tensor differs."""
    shape = reader.shape(name)
    length = max(1, BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))
    rows = shape[0] if shape else 1
    dtype = ""
    for start in range(0, rows, length):
        block = reader.rows(name, 0, start, min(length, rows - start))
        dtype = str(block.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != shape:
            return dtype, f"{name} is exported in shape {tuple(tensor.shape)}, the checkpoint's is {shape}"
        mine = tensor[start : start + length] if shape else tensor
        mine, theirs = mine.contiguous(), block.to(tensor.dtype).contiguous()
        wrong = (bits_of(mine) != bits_of(theirs)).nonzero()
        if len(wrong):
            place = tuple(wrong[0].tolist())
            at = [start + place[0], *place[1:]] if place else []
            return dtype, (
                f"{name} at {at}: exported {float(mine[place])!r}, in the checkpoint {float(theirs[place])!r}"
            )
    return dtype, ""

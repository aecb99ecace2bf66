"""Makes one rank's part of a check: loads the model, and compares log-probabilities and its export."""

import math
import re
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from protocol.device.slice_digests import bits_of
from trainer.algorithms.registry import make_algorithm
from trainer.backends.base import Backend
from trainer.batch import Batch
from trainer.config import AlgorithmConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.fsdp.backend import FsdpBackend
from trainer.megatron.backend import MegatronBackend
from trainer.megatron.families.decoder import ignorable
from trainer.megatron.families.reading import read_architecture
from trainer.megatron.loading import SafetensorsReader

LoadedBackend = TypeVar("LoadedBackend", MegatronBackend, FsdpBackend)

TOLERANCE = 1e-4
"""Allowed difference of a log-probability, relative to the larger of its size and 1."""
CONTEXT = 8
"""Tokens before a wrong one that are shown."""
BLOCK_ELEMENTS = 1 << 24
"""Elements of a checkpoint's tensor that are read at a time, unless a row has more."""


@dataclass(frozen=True, slots=True)
class LogprobFindings:
    """Differences of log-probabilities from the expected ones."""

    compared: int
    """Log-probabilities."""
    largest: float | None
    """The largest difference; None if a value is not finite."""
    difference: str
    """The first one over the tolerance, with its place; empty if there is none."""


@dataclass(frozen=True, slots=True)
class TensorFindings:
    """Differences of exported tensors from a checkpoint's."""

    compared: int
    """Tensors."""
    dtypes: list[str]
    """Data types of the checkpoint's tensors."""
    ignored: list[str]
    """Tensors of the checkpoint that the model does not need."""
    difference: str
    """The first one, with its place; empty if there is none."""


def compare_logprobs(batch: Batch, found: torch.Tensor, expected: torch.Tensor) -> LogprobFindings:
    """Compare the log-probabilities (float32 [t]) of a batch's sampled tokens; NaN is a difference."""
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
    """Compare an export with the checkpoint that was loaded, bit for bit, after the cast of loading.

    Args:
        exported: the export, which is exhausted also after a difference, because other ranks take part in it.
        reader: the checkpoint.
        is_ignorable: whether the model does not need a tensor of that name.
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
    """Return the dtype of a checkpoint's tensor, and the first place where the exported one differs."""
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


MICRO_BATCH_TOKENS = 256
"""So several samples are in a micro-batch, and there are several micro-batches."""


@dataclass(frozen=True, slots=True)
class RankFindings:
    """Results of the comparisons, on rank 0."""

    logprobs: LogprobFindings
    tensors: TensorFindings


def check_on_rank(
    model_dir: Path, parallel: ParallelConfig, threads: int, batch: Batch, expected: torch.Tensor
) -> RankFindings | None:
    """Load the model as the trainer does, in float32 on the CPU, and compare. A collective.

    Args:
        model_dir: the checkpoint.
        parallel: layout of the ranks; every replica computes the whole batch.
        threads: CPU threads of this rank.
        batch: samples; equal on every rank.
        expected: their log-probabilities, float32 [t].

    Returns:
        On rank 0 what was found, None on the others.

    Raises:
        SettingsError: the model is not supported, or does not fit the layout.
    """
    with _loaded(MegatronBackend, model_dir, parallel, threads) as backend:
        architecture = read_architecture(model_dir)
        return _compare(backend, model_dir, batch, expected, lambda name: ignorable(architecture, name))


def check_sharded(
    model_dir: Path, threads: int, batch: Batch, expected: torch.Tensor
) -> tuple[RankFindings, str]:
    """Check a model of transformers with the backend `fsdp` on one rank; arguments as in `check_on_rank`.

    Returns:
        What was found, and why its samples are not packed; empty where they are.

    Raises:
        SettingsError: transformers cannot load the model, or its checkpoint cannot be made from it.
    """
    with _loaded(FsdpBackend, model_dir, ParallelConfig(), threads) as backend:
        ignored = backend.ignored_names
        findings = _compare(
            backend, model_dir, batch, expected, lambda name: any(re.search(one, name) for one in ignored)
        )
        assert findings is not None  # this is rank 0
        return findings, backend.why_rows


def _loaded(
    kind: Callable[..., LoadedBackend], model_dir: Path, parallel: ParallelConfig, threads: int
) -> closing[LoadedBackend]:
    """Load a model as the trainer does; at the end of a `with` it is closed."""
    return closing(
        kind(
            model_dir,
            parallel=parallel,
            optimizer=OptimizerConfig(),
            trainer=TrainerConfig(device="cpu", threads=threads, micro_batch_tokens=MICRO_BATCH_TOKENS),
            algorithm=make_algorithm(AlgorithmConfig()),
        )
    )


def _compare(
    backend: Backend,
    model_dir: Path,
    batch: Batch,
    expected: torch.Tensor,
    is_ignorable: Callable[[str], bool],
) -> RankFindings | None:
    logprobs = backend.logprobs(batch)
    if dist.get_rank():
        for _ in backend.export():
            raise RuntimeError("only rank 0 gets tensors from an export")
        return None
    with SafetensorsReader(model_dir) as reader:
        tensors = compare_tensors(backend.export(), reader, is_ignorable)
    return RankFindings(compare_logprobs(batch, logprobs, expected), tensors)

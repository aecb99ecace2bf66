"""Runs one rank's part of a check: loads the model, computes log-probabilities, exports."""

import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from trainer.algorithms.registry import make_algorithm
from trainer.backends.base import Backend
from trainer.backends.safetensors_reader import SafetensorsReader
from trainer.batch import Batch
from trainer.config import AlgorithmConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.fsdp.backend import FsdpBackend
from trainer.megatron.backend import MegatronBackend
from trainer.megatron.families.decoder import ignorable
from trainer.megatron.families.reading import read_architecture
from trainer.model_check.differences import (
    LogprobFindings,
    TensorFindings,
    compare_logprobs,
    compare_tensors,
)

LoadedBackend = TypeVar("LoadedBackend", MegatronBackend, FsdpBackend)

MICRO_BATCH_TOKENS = 256
"""Small enough for several micro-batches, large enough for several samples in each."""


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
        model_dir: directory of the checkpoint.
        parallel: layout of the ranks; every replica computes the whole batch.
        threads: CPU threads of this rank.
        batch: samples; equal on every rank.
        expected: expected log-probabilities of the samples, float32 [t].

    Returns:
        The results on rank 0, None on the other ranks.

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
        Results, and the reason why samples are not packed; empty if they are.

    Raises:
        SettingsError: transformers cannot load the model, or the checkpoint's tensors cannot be restored from
            it.
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
    """Load a model as the trainer does; closed at the end of a `with` block."""
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

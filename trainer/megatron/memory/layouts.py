"""Lists the layouts in which a model fits on some GPUs, by the expected peak of a step.

Does not import torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from protocol.errors import SettingsError
from trainer.config import ParallelConfig
from trainer.megatron.families.experts import check_ranks
from trainer.megatron.families.stages import export_plan
from trainer.megatron.layout import Layout
from trainer.megatron.memory.expected import Workload
from trainer.memory.expected import USED_SHARE, ExpectedMemory, largest_budget

TENSOR_RANKS = (1, 2, 4, 8)
"""Candidate numbers of tensor ranks. They exchange activations in every layer, so they share a host."""


@dataclass(frozen=True, slots=True)
class FittingLayout:
    """Layout in which a step fits, with its largest micro-batch."""

    parallel: ParallelConfig
    tokens: int
    """Largest micro-batch of a rank, tokens."""
    memory: ExpectedMemory
    """Expected memory with the largest micro-batch."""

    @property
    def model_ranks(self) -> int:
        """Number of ranks that share one copy of the model."""
        return self.parallel.world_size // self.parallel.data_parallel_size


def fitting_layouts(work: Workload, gpus: int, gpu_bytes: int, sample_tokens: int) -> list[FittingLayout]:
    """Return the fitting layouts of all GPUs, those with the fewest ranks per model first.

    Args:
        work: workload of the run. The tensor, pipeline, data and expert ranks of its layout are ignored.
        gpus: number of GPUs of the trainer.
        gpu_bytes: memory of one GPU, bytes. A peak may use `USED_SHARE` of it.
        sample_tokens: length of the longest sample with prompt, which must fit in a micro-batch.
    """
    fitting = []
    for parallel in _layouts(work, gpus):
        changed = replace(work, parallel=parallel)
        tokens = largest_budget(changed, gpu_bytes * USED_SHARE)
        if tokens * parallel.context_parallel_size >= sample_tokens:
            fitting.append(FittingLayout(parallel, tokens, changed.expected(tokens)))
    return sorted(
        fitting, key=lambda layout: (layout.model_ranks, layout.parallel.pipeline_model_parallel_size)
    )


def _layouts(work: Workload, gpus: int) -> Iterator[ParallelConfig]:
    """Yield the layouts of `gpus` ranks that divide the model."""
    architecture, context = work.architecture, work.parallel.context_parallel_size
    expert_ranks = _divisors(architecture.experts.count) if architecture.experts.count else [1]
    for tensor in TENSOR_RANKS:
        for pipeline in _divisors(architecture.layers):
            data, rest = divmod(gpus, tensor * pipeline * context)
            if rest or not data or architecture.heads % tensor:
                continue
            for expert in expert_ranks:
                if (tensor * context * data) % expert:
                    continue
                parallel = replace(
                    work.parallel,
                    tensor_model_parallel_size=tensor,
                    pipeline_model_parallel_size=pipeline,
                    data_parallel_size=data,
                    virtual_pipeline_model_parallel_size=1,
                    expert_model_parallel_size=expert,
                    expert_tensor_parallel_size=1,
                    sequence_parallel=tensor > 1,
                )
                if _is_possible(work, parallel):
                    yield parallel


def _is_possible(work: Workload, parallel: ParallelConfig) -> bool:
    """Return whether the trainer supports a layout of the model."""
    try:
        check_ranks(work.architecture.experts, parallel)
        export_plan(work.architecture, Layout.of(parallel, work.architecture.layers))
    except SettingsError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]

"""Runs the optimizer steps of one model: passes, gradient reduction, optimizer, loss scale."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.backends.base import NOTHING_TRAINED
from trainer.batch import Batch
from trainer.config import OptimizerConfig
from trainer.megatron.forward import Runner
from trainer.megatron.memory.host_optimizer import HostOptimizer
from trainer.megatron.optimizer import LossScale, Optimizer
from trainer.megatron.parallel import Position
from trainer.memory.oom_retry import OomRetry
from trainer.step.measures import PassResult


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStepResult:
    """Result of an optimizer step; equal on every rank."""

    passes: PassResult
    norm: float
    skipped: str
    """Reason why the weights are unchanged; empty if changed."""
    loss_scale: float | None
    loss_scale_repeats: int | None
    warnings: tuple[str, ...]


class ModelStepper:
    """Passes and optimizer of one model."""

    def __init__(
        self,
        runner: Runner,
        config: TransformerConfig,
        optimizer: OptimizerConfig,
        *,
        tokens: int,
        separate_masters: bool = False,
    ) -> None:
        """Build on a model with loaded weights. A collective.

        Args:
            runner: runner of the model, with chunks from `wrap_model`.
            config: megatron's configuration of the model; receives the function that finalizes gradients.
            optimizer: settings of AdamW.
            tokens: initial number of tokens per micro-batch.
            separate_masters: whether masters are separate for float32 too.
        """
        dtype, position = config.params_dtype, runner.position
        self.runner = runner
        kind = HostOptimizer if optimizer.cpu_offload else Optimizer
        self.optimizer = kind(optimizer, runner.chunks, position, dtype, separate_masters=separate_masters)
        if dtype is torch.float16:
            scale = self.optimizer.loss_scale = LossScale(optimizer)
            config.grad_scale_func = lambda loss: loss * scale.value
        self.passes = retry_of(position, tokens, self.optimizer.zero_grad)
        config.finalize_model_grads_func = self.passes.exchange_outcomes_before(
            config.finalize_model_grads_func
        )

    def step(
        self,
        batch: Batch,
        passes: Callable[[], PassResult],
        *,
        lr_scale: Callable[[torch.Tensor], float] | None,
    ) -> OptimizerStepResult:
        """Run one optimizer step. A collective.

        Args:
            batch: this replica's part of the batch.
            passes: runs forward and backward passes over `batch`, as `Runner.train` does.
            lr_scale: maps the passes' measurements to a factor of the learning rate; None: no token of any
                replica is trained.
        """
        scale, warnings = self.optimizer.loss_scale, list[str]()

        def attempt() -> tuple[OptimizerStepResult, float]:
            self.optimizer.zero_grad()
            found, told = self.passes.step(self.runner, batch, passes)
            warnings.extend(told)
            used = scale.value if scale is not None else None
            norm, skipped = (
                self.optimizer.step(lr_scale(found.vector)) if lr_scale else (0.0, NOTHING_TRAINED)
            )
            made = OptimizerStepResult(
                passes=found,
                norm=norm,
                skipped=skipped,
                loss_scale=used,
                loss_scale_repeats=None,
                warnings=(),
            )
            return made, norm

        made, repeats = scale.repeated(attempt) if scale is not None else (attempt()[0], None)
        return replace(made, loss_scale_repeats=repeats, warnings=tuple(warnings))

    def held(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors that an offload keeps in addition to parameters, and the tensors to discard."""
        self.optimizer.zero_grad()
        buffers = [
            buffer
            for chunk in self.runner.chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
        kept = [buffer.param_data for buffer in buffers if buffer.param_data is not None]
        return [*self.optimizer.tensors(), *kept], [buffer.grad_data for buffer in buffers]


def retry_of(position: Position, tokens: int, reset: Callable[[], None]) -> OomRetry:
    """Return the out-of-memory retry of a rank; arguments as in `OomRetry`.

    With tensor, pipeline or context parallelism, or experts on several ranks, ranks wait for each other
    within a pass. With `overlap_grad_reduce`, gradients are reduced within a pass.
    """
    parallel = position.config
    replicas = parallel.data_parallel_size
    experts = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
    within = len(position.replicas()[0]) == 1 and experts == 1
    can_abort = within and not (replicas > 1 and parallel.overlap_grad_reduce)
    return OomRetry(position.device, tokens, reset, replicas=replicas, can_abort=can_abort)

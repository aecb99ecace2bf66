"""Trains a critic that is sharded over the ranks."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainer.backends.base import StepStats
from trainer.batch import Batch, trained_tokens
from trainer.config import OptimizerConfig, TrainerConfig
from trainer.fsdp.backend import FsdpBackend
from trainer.fsdp.model import ShardedValues
from trainer.fsdp.passes import Pass, forget_pass, make_retry
from trainer.fsdp.sharding import resharded_at_end
from trainer.fsdp.stepper import make_stepper
from trainer.reference.critic import CRITIC
from trainer.reference.shards import DATA, gathered
from trainer.reference.state import CheckpointedModel
from trainer.roles.config import CriticConfig
from trainer.roles.critic import Critic
from trainer.roles.value_measures import ValueMeasures


class FsdpCritic(CheckpointedModel, Critic):
    """Critic with AdamW on sharded float32 parameters, on the policy's ranks or on ranks of its own."""

    def __init__(
        self,
        mesh: DeviceMesh,
        architecture: str,
        model_dir: Path,
        *,
        optimizer: OptimizerConfig,
        trainer: TrainerConfig,
        config: CriticConfig,
    ) -> None:
        """Load the model of a Hugging Face directory. A collective.

        Args:
            architecture: architecture of the policy, which checkpoints of the critic contain.
            optimizer: settings of the policy's optimizer.

        Raises:
            SettingsError: as `ValueModel`.
        """
        self.config, self._mesh, self._trainer = config, mesh, trainer
        self._architecture = f"{architecture} with a value head"
        self._sharded = ShardedValues(model_dir, CRITIC, mesh, trainer, is_trained=True)
        self._model, self._passes = self._sharded.module, self._sharded.passes
        self._trained = dict(self._model.named_parameters())
        self._stepper = make_stepper(self._trained, config.optimizer(optimizer), trainer, mesh)
        self._retry = make_retry(self._passes, self._mesh, self._forget_passes)
        super().__init__(self._passes.device, mesh.get_rank())

    @classmethod
    def on_policy_ranks(cls, policy: FsdpBackend, model_dir: Path, **settings: Any) -> "FsdpCritic":
        """Load the model on the policy's ranks; arguments as in `make_critic`. A collective."""
        trainer = replace(settings.pop("trainer"), micro_batch_tokens=policy.tokens)
        return cls(policy.mesh, policy.architecture, model_dir, trainer=trainer, **settings)

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole parameters under their checkpoint names, on every rank. A collective."""
        device = self._passes.device
        yield from ((name, gathered(p.detach().to(device))) for name, p in self._trained.items())

    def values(self, batch: Batch) -> torch.Tensor:
        return self._retry.run_without_gradients(self._passes, batch, lambda: self._sharded.evaluate(batch))

    def train_step(self, batch: Batch) -> StepStats:
        measures = ValueMeasures.of_batch(batch, self.config.value_clip)
        device = self._passes.device

        def run() -> list[torch.Tensor]:
            with resharded_at_end(self._model, self._mesh, self._trainer):
                return [
                    self._accumulate(one, batch.select(one.samples).to(device), measures)
                    for one in self._passes.divide(batch)
                ]

        vectors, warnings = self._retry.step(self._passes, batch, run)
        sums, maxima = measures.split(measures.join(vectors, device))
        group = self._mesh.get_group(DATA)
        dist.all_reduce(sums, group=group)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group)
        norm, skipped = self._stepper.step() if measures.tokens else (0.0, "")
        stats = measures.stats(torch.cat([sums, maxima]), grad_norm=norm, skipped=skipped)
        return msgspec.structs.replace(stats, warnings=stats.warnings + warnings)

    def _forget_passes(self) -> None:
        """Drop the state of interrupted passes."""
        forget_pass(self._model)
        self._stepper.zero_grad()

    def _identity(self) -> dict[str, str]:
        return {"backend": "fsdp", "role": "critic", "architecture": self._architecture}

    def _accumulate(self, forward_pass: Pass, part: Batch, measures: ValueMeasures) -> torch.Tensor:
        """Add one pass's gradient to the shards' gradients; return its measurements."""
        tokens = trained_tokens(part)
        with self._passes.inputs(forward_pass, part) as inputs:
            values = self._model(inputs.arguments, inputs.rows[tokens.place])
            loss, vector = measures.micro_batch_loss(tokens, values)
            loss.backward()
        return vector

"""Trains a critic with megatron-core, on the policy's ranks and layout, or on separate ranks."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch

from trainer.backends.base import Replicas, StepStats
from trainer.backends.host_offload import HostOffload, Offloadable
from trainer.batch import Batch
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.megatron import parallel
from trainer.megatron.backend import MegatronBackend, initialize
from trainer.megatron.checkpoint.state import copy_part, restore_part
from trainer.megatron.families.experts import check_ranks
from trainer.megatron.families.reading import read_critic
from trainer.megatron.layout import Layout
from trainer.megatron.memory.expected import Workload
from trainer.megatron.part import ModelPart
from trainer.megatron.roles.value_runner import ValueRunner
from trainer.memory.plan import MemoryPlan, peak_gb
from trainer.roles.config import CriticConfig
from trainer.roles.critic import Critic, CriticSpec
from trainer.roles.value_measures import ValueMeasures
from trainer.storage.host_state import HostCopies, HostState


class MegatronCritic(parallel.GroupMember, Offloadable, Critic):
    """Hugging Face checkpoint with a value head instead of its output layer."""

    def __init__(
        self,
        layout: ParallelConfig,
        tokens: int,
        model_dir: Path,
        *,
        optimizer: OptimizerConfig,
        trainer: TrainerConfig,
        config: CriticConfig,
    ) -> None:
        """Load the model. A collective.

        Args:
            layout: parallel sizes of the critic's ranks.
            tokens: initial number of tokens per micro-batch.
            model_dir: Hugging Face directory.
            optimizer: settings of the policy's optimizer.
            trainer: settings of the backend.
            config: settings of the critic.

        Raises:
            SettingsError: the model is not supported, or does not fit the layout.
        """
        self.config, self._trainer = config, trainer
        spec = read_critic(model_dir)
        check_ranks(spec.experts, layout)
        Layout.of(layout, spec.layers)  # raises before ranks connect
        self._position = parallel.initialize(
            layout, trainer.device, trainer.seed, trainer.process_group_timeout_s
        )
        try:
            self._part = ModelPart(spec, self._position, trainer)
            chunks = self._part.build()
            self._parameters = self._part.load(model_dir, chunks)
            self._stepper = self._part.stepper(
                chunks, config.optimizer(optimizer), ValueRunner, tokens=tokens
            )
            self._runner: Any = self._stepper.runner
        except BaseException:
            self.close()
            raise
        self._host, self._copies = HostOffload(self._position.device), HostCopies()

    @classmethod
    def on_policy_ranks(cls, policy: MegatronBackend, model_dir: Path, **settings: Any) -> "MegatronCritic":
        """Load the model on the policy's ranks; arguments as in `make_critic`. A collective."""
        return cls(policy.position.config, policy.tokens, model_dir, **settings)

    def values(self, batch: Batch) -> torch.Tensor:
        return self._stepper.passes.run_without_gradients(
            self._runner, batch, lambda: self._runner.evaluate(batch)
        )

    def train_step(self, batch: Batch) -> StepStats:
        measures = ValueMeasures.of_batch(batch, self.config.value_clip)
        step = self._stepper.step(
            batch,
            lambda: self._runner.train(batch, measures.micro_batch_loss, measures),
            lr_scale=(lambda _: 1.0) if measures.tokens else None,
        )
        if not step.skipped:
            self._runner.update_biases(self._trainer.moe_router_bias_update_rate)
        stats = measures.stats(step.passes.vector, grad_norm=step.norm, skipped=step.skipped)
        return msgspec.structs.replace(
            stats, memory_peak_gb=peak_gb(self._position.device), warnings=stats.warnings + step.warnings
        )

    def copy_state(self) -> HostState:
        optimizer, model = self._stepper.optimizer, self._part.description()
        return copy_part(self._copies, self._parameters, optimizer, model, self._position.rank)

    def restore(self, directory: Path) -> None:
        optimizer, model = self._stepper.optimizer, self._part.description()
        restore_part(directory, self._parameters, optimizer, model, self._position.rank)

    def _offloadable_tensors(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        kept, blank = self._stepper.held()
        return [*self._parameters.values(), *kept], blank


def load_remote_critic(
    spec: CriticSpec, parallel: ParallelConfig, trainer: TrainerConfig
) -> tuple[Critic, Replicas]:
    """Load a critic on separate ranks; arguments as in `trainer.registry.make_remote_critic`. A collective.

    Raises:
        SettingsError: the model is not supported, or does not fit the layout or its devices.
    """
    position = initialize(parallel, trainer)
    architecture, optimizer = read_critic(spec.directory), spec.config.optimizer(spec.optimizer)
    work = Workload(architecture=architecture, parallel=parallel, trainer=trainer, optimizer=optimizer)
    critic = MegatronCritic(
        parallel,
        MemoryPlan(work, position.device).tokens,
        spec.directory,
        optimizer=spec.optimizer,
        trainer=trainer,
        config=spec.config,
    )
    return critic, position.replicas()

"""Trains a critic with plain torch and transformers: the oracle of the other backends' critics."""

from pathlib import Path
from typing import Any

import torch

from trainer.backends.base import Replicas, StepStats
from trainer.batch import Batch, trained_tokens
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.reference.backend import DTYPES, ReferenceBackend, choose_device, require_one_rank
from trainer.reference.frozen import architecture_of, in_dtype
from trainer.reference.logprobs import evaluate, passes
from trainer.reference.optimizer_step import MasterStepper, masters_of
from trainer.reference.state import CheckpointedModel
from trainer.reference.values import HEAD, ValueModel, values_at
from trainer.roles.config import CriticConfig
from trainer.roles.critic import Critic, CriticSpec
from trainer.roles.value_measures import ValueMeasures

CRITIC = "setting critic.path:"
"""Prefix of errors about the critic's directory."""


class ReferenceCritic(CheckpointedModel, Critic):
    """Critic with fp32 masters on one rank; deterministic on the CPU."""

    def __init__(
        self,
        device: torch.device,
        architecture: str,
        model_dir: Path,
        *,
        optimizer: OptimizerConfig,
        trainer: TrainerConfig,
        config: CriticConfig,
    ) -> None:
        """Load the model of a Hugging Face directory.

        Args:
            device: device of the model.
            architecture: class name of the policy, with which checkpoints identify this model.
            model_dir: Hugging Face directory.
            optimizer: settings of the policy's optimizer.
            trainer: settings of the backend.
            config: settings of the critic.

        Raises:
            SettingsError: transformers cannot load the directory, or its head has several labels.
        """
        self.config, self._trainer, self._device = config, trainer, device
        self._architecture = f"{architecture} with a value head"
        self._model = ValueModel(model_dir, CRITIC).to(self._device)
        self._trained = dict(self._model.named_parameters())
        self._masters = masters_of(self._trained, separate_masters=trainer.dtype != "float32")
        in_dtype(self._model, DTYPES[trainer.dtype])
        ends = ("model.embed_tokens.weight", HEAD[0])
        self._optimizer = config.optimizer(optimizer)
        self._stepper = MasterStepper(
            self._trained,
            self._masters,
            self._optimizer,
            [self._masters[name] for name in ends if name in self._masters],
        )
        super().__init__(self._device)

    @classmethod
    def on_policy_ranks(cls, policy: ReferenceBackend, model_dir: Path, **settings: Any) -> "ReferenceCritic":
        """Load the model on the policy's rank; arguments as in `make_critic`."""
        return cls(policy.device, policy.architecture, model_dir, **settings)

    def values(self, batch: Batch) -> torch.Tensor:
        return evaluate(values_at, self._model, batch, self._trainer)

    def train_step(self, batch: Batch) -> StepStats:
        measures = ValueMeasures.of_batch(batch, self.config.value_clip)
        packed = passes(batch, self._trainer)
        vectors = [self._accumulate(batch.select(samples).to(self._device), measures) for samples in packed]
        norm, skipped = self._stepper.step() if measures.tokens else (0.0, "")
        return measures.stats(measures.join(vectors, self._device), grad_norm=norm, skipped=skipped)

    def _identity(self) -> dict[str, str]:
        optimizer = {} if self._optimizer.name == "adamw" else {"optimizer": self._optimizer.name}
        return {
            "backend": "reference", "role": "critic", "architecture": self._architecture, **optimizer
        }  # fmt: skip

    def _accumulate(self, part: Batch, measures: ValueMeasures) -> torch.Tensor:
        """Add one micro-batch's gradient to the masters' gradients; return the measurements."""
        tokens = trained_tokens(part)
        loss, vector = measures.micro_batch_loss(tokens, values_at(self._model, part, tokens.place))
        loss.backward()
        self._stepper.collect()
        return vector


def load_remote_critic(
    spec: CriticSpec, parallel: ParallelConfig, trainer: TrainerConfig
) -> tuple[Critic, Replicas]:
    """Load a critic on a separate rank; arguments as in `trainer.registry.make_remote_critic`.

    Raises:
        SettingsError: transformers cannot load the model, or there are several ranks.
    """
    require_one_rank()
    torch.set_num_threads(trainer.threads)
    critic = ReferenceCritic(
        choose_device(trainer.device),
        architecture_of(spec.policy_dir),
        spec.directory,
        optimizer=spec.optimizer,
        trainer=trainer,
        config=spec.config,
    )
    return critic, ((0,),)

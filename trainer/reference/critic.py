"""Trains a critic with plain torch and transformers: the oracle of the other backends' critics."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from protocol.errors import SettingsError
from trainer.backends.base import Replicas, StepStats
from trainer.batch import Batch, trained_tokens
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.reference.backend import DTYPES, ReferenceBackend, choose_device, require_one_rank
from trainer.reference.frozen import architecture_of, in_dtype, load_model
from trainer.reference.logprobs import padded, passes
from trainer.reference.optimizer_step import MasterStepper
from trainer.reference.state import SavedStepper
from trainer.roles.config import CriticConfig
from trainer.roles.critic import Critic, CriticSpec
from trainer.roles.value_measures import ValueMeasures

CRITIC = "setting critic.path:"
"""Begins errors about its directory."""
HEAD = ("score.weight", "score.bias")
"""Names of the value head in a checkpoint of Hugging Face."""


class ValueModel(torch.nn.Module):
    """A transformer without its output layer, and a linear layer from hidden states to values."""

    def __init__(self, model_dir: Path, *, blank: bool = False) -> None:
        """Load both; a head that is not in the checkpoint is zero, `blank` is as in `load_model`.

        Raises:
            SettingsError: transformers cannot load the directory, or its head has several labels.
        """
        super().__init__()
        self.model = load_model(model_dir, CRITIC, with_head=False, blank=blank)
        hidden = self.model.get_input_embeddings().weight.shape[1]
        self.score = torch.nn.Linear(hidden, 1)
        head = read_head(model_dir, hidden)
        with torch.no_grad():
            for name in HEAD:
                self.get_parameter(name).zero_()
                if name in head:
                    self.get_parameter(name).copy_(head[name])

    def forward(self, arguments: dict[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """Return the values at inputs of the transformer.

        Args:
            arguments: of the transformer's call.
            rows: int64 [k], counted over all inputs.

        Returns: float32 [k].
        """
        hidden = self.model(**arguments, use_cache=False).last_hidden_state.flatten(0, 1)[rows]
        weight, bias = self.score.weight.float(), self.score.bias.float()
        return torch.nn.functional.linear(hidden.float(), weight, bias)[:, 0]


class ReferenceCritic(SavedStepper, Critic):
    """AdamW on fp32 masters, on one rank; deterministic on the CPU."""

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
        """Load the model of a Hugging Face directory; the last arguments are as in `make_critic`.

        Args:
            device: where it computes.
            architecture: the policy's, by which checkpoints name this model.
            model_dir: the directory.
            optimizer: the policy's.
            trainer: settings of the backend.
            config: settings of the critic.

        Raises:
            SettingsError: as `ValueModel`.
        """
        self.config, self._trainer, self._device = config, trainer, device
        self._architecture = f"{architecture} with a value head"
        self._model = ValueModel(model_dir).to(self._device)
        self._trained = dict(self._model.named_parameters())
        self._masters: dict[str, torch.nn.Parameter] = self._trained
        if trainer.dtype != "float32":
            self._masters = {
                name: torch.nn.Parameter(p.detach().clone()) for name, p in self._trained.items()
            }
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
    def beside(cls, policy: ReferenceBackend, model_dir: Path, **settings: Any) -> "ReferenceCritic":
        """Load the model on the policy's rank; arguments as in `make_critic`."""
        return cls(policy.device, policy.architecture, model_dir, **settings)

    @torch.no_grad()
    def values(self, batch: Batch) -> torch.Tensor:
        out = torch.zeros(len(batch.tokens))
        for samples in passes(batch, self._trainer):
            part = batch.select(samples).to(self._device)
            found = self._values(part, part.sampled_mask)
            out[batch.sampled_mask & torch.isin(batch.sample_index, samples)] = found.cpu()
        return out

    def train_step(self, batch: Batch) -> StepStats:
        measures = ValueMeasures.of_batch(batch, self.config.value_clip)
        packed = passes(batch, self._trainer)
        vectors = [self._accumulate(batch.select(samples).to(self._device), measures) for samples in packed]
        norm, skipped = self._stepper.step() if measures.tokens else (0.0, "")
        return measures.stats(measures.join(vectors, self._device), grad_norm=norm, skipped=skipped)

    def _held(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        self._stepper.zero_grad()
        weights = [*self._model.parameters(), *self._model.buffers()]
        return [*weights, *self._stepper.tensors()], ()

    def close(self) -> None:
        """Release the gradients."""
        self._stepper.zero_grad()

    def _identity(self) -> dict[str, str]:
        optimizer = {} if self._optimizer.name == "adamw" else {"optimizer": self._optimizer.name}
        return {
            "backend": "reference", "role": "critic", "architecture": self._architecture, **optimizer
        }  # fmt: skip

    def _values(self, part: Batch, place: torch.Tensor) -> torch.Tensor:
        """Return the values of the states in which tokens of a micro-batch were sampled, [k]."""
        ids, sample, position = padded(part)
        rows = sample * ids.size(1) + position - 1
        values: torch.Tensor = self._model({"input_ids": ids}, rows[place])
        return values

    def _accumulate(self, part: Batch, measures: ValueMeasures) -> torch.Tensor:
        """Add one micro-batch's gradient to the masters'; return its measurements."""
        tokens = trained_tokens(part)
        loss, vector = measures.micro_batch_loss(tokens, self._values(part, tokens.place))
        loss.backward()
        self._stepper.collect()
        return vector


def load_critic_apart(
    spec: CriticSpec, parallel: ParallelConfig, trainer: TrainerConfig
) -> tuple[Critic, Replicas]:
    """Load a critic; as `trainer.registry.make_critic_apart`.

    Raises:
        SettingsError: transformers cannot load it, or it has several ranks.
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


def read_head(model_dir: Path, hidden: int) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors of a value head, by its names there.

    Raises:
        SettingsError: it has several labels.
    """
    head: dict[str, torch.Tensor] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            head |= {name: file.get_tensor(name) for name in HEAD if name in file.keys()}  # noqa: SIM118 (not a mapping)
    for name, shape in zip(HEAD, ((1, hidden), (1,)), strict=True):
        if name in head and tuple(head[name].shape) != shape:
            raise SettingsError(
                f"setting critic.path: {name} in {model_dir} has shape {tuple(head[name].shape)}, and a "
                f"critic has one label, {shape}"
            )
    return head

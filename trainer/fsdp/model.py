"""Shards transformers models over the ranks, and computes log-probabilities or values with these models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from trainer.backends.base import FrozenSpec
from trainer.backends.last_states import LastStates, read_by_output
from trainer.batch import Batch
from trainer.config import TrainerConfig
from trainer.fsdp.loading import assign_shards, load_shards
from trainer.fsdp.output_layer import Tokens
from trainer.fsdp.passes import Pass, Passes
from trainer.fsdp.sharding import divide, resharded_at_end, shard
from trainer.functional.logprobs import token_logprobs
from trainer.reference.backend import DTYPES
from trainer.reference.frozen import in_dtype, load_model
from trainer.reference.shards import gathered
from trainer.reference.values import ValueModel

T = TypeVar("T")


class ShardedModel:
    """A sharded causal language model, and its passes that compute log-probabilities of a batch.

    Shapes: k requested tokens of a pass.
    """

    def __init__(
        self,
        model_dir: Path,
        setting: str,
        mesh: DeviceMesh,
        trainer: TrainerConfig,
        *,
        prepare: Callable[[Any], object] | None = None,
    ) -> None:
        """Load and shard a model. A collective.

        Args:
            setting: name of the directory's setting, for error messages.
            trainer: dtype and size of the passes, and recomputation of layers.
            prepare: called with a trained model before sharding; a trained model has float32 masters. None:
                the model is frozen, in the dtype of the passes.

        Raises:
            SettingsError: transformers cannot load the model.
        """
        self._mesh, self._trainer = mesh, trainer
        tensors, traits = load_shards(model_dir, setting, mesh, trainer)
        self.module: Any = load_model(model_dir, setting, blank=True)
        divide(self.module, mesh)
        self._output = traits.apply(self.module)
        self.passes = Passes(self.module, mesh, trainer, traits.why_rows)
        if prepare is None:
            in_dtype(self.module.requires_grad_(False), DTYPES[trainer.dtype])
        else:
            prepare(self.module)
        shard(self.module, self.module, mesh, trainer)
        held = prepare is not None and trainer.offload_parameters
        assign_shards(self.module, tensors, torch.device("cpu") if held else self.passes.device)

    def run(
        self,
        forward_pass: Pass,
        part: Batch,
        place: torch.Tensor,
        finish: Callable[[torch.Tensor, torch.Tensor], T],
    ) -> T:
        """Run a pass, and return the result of `finish`. A collective.

        Args:
            part: samples of the pass, on the device.
            place: int64 [k], requested tokens of the part.
            finish: (log-probabilities [k], entropies [k]) -> result; may run the backward pass.
        """
        with self.passes.inputs(forward_pass, part) as inputs:
            tokens = Tokens(inputs.rows[place], part.tokens[place].long(), part.temperature)
            return finish(*self._logprobs(inputs.arguments, tokens))

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Return the log-probabilities of a batch's sampled tokens, 0 elsewhere: float32 [t], on the CPU."""
        with resharded_at_end(self.module, self._mesh, self._trainer):
            return self.passes.sampled(
                batch,
                lambda one, part: self.run(
                    one, part, part.sampled_mask.nonzero()[:, 0], lambda found, _: found
                ),
            )

    @torch.no_grad()
    def last_states(self, batch: Batch) -> LastStates:
        """Return the hidden states of a batch's tokens, as `LastStates`. With one rank only."""
        layers = self.module.get_input_embeddings(), self.module.get_output_embeddings()
        weights = [gathered(layer.weight).to(self.passes.device) for layer in layers]
        states = torch.zeros(len(batch.tokens), weights[0].shape[1], device=self.passes.device)
        with resharded_at_end(self.module, self._mesh, self._trainer):
            for one in self.passes.divide(batch):
                part = batch.select(one.samples).to(self.passes.device)
                with self.passes.inputs(one, part) as inputs:
                    found = read_by_output(self.module, inputs.arguments).flatten(0, 1)[inputs.rows]
                states[torch.isin(batch.sample_index, one.samples).to(states.device)] = found.float()
        return LastStates(states, *weights)

    def _logprobs(
        self, arguments: dict[str, torch.Tensor], tokens: Tokens
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._output is not None:
            return self._output.logprobs(self.module, arguments, tokens)
        logits = self.module(**arguments, use_cache=False).logits.flatten(0, 1)
        return token_logprobs(logits.index_select(0, tokens.rows), tokens.targets, tokens.temperature)


class ShardedValues:
    """A sharded model with a value head, and its passes that compute values of a batch."""

    def __init__(
        self, model_dir: Path, setting: str, mesh: DeviceMesh, trainer: TrainerConfig, *, is_trained: bool
    ) -> None:
        """Load and shard a model. A collective.

        Args:
            setting: name of the directory's setting, for error messages.
            is_trained: whether the model has float32 masters; a frozen model is in the dtype of the passes.

        Raises:
            SettingsError: as `ValueModel`.
        """
        self._mesh, self._trainer = mesh, trainer
        tensors, traits = load_shards(model_dir, setting, mesh, trainer, with_head=False)
        self.module = ValueModel(model_dir, setting, blank=True)
        divide(self.module.model, mesh)
        traits.apply(self.module.model)
        self.passes = Passes(self.module.model, mesh, trainer, traits.why_rows)
        if not is_trained:
            in_dtype(self.module.requires_grad_(False), DTYPES[trainer.dtype])
        shard(self.module, self.module.model, mesh, trainer)
        held = is_trained and trainer.offload_parameters
        assign_shards(self.module.model, tensors, torch.device("cpu") if held else self.passes.device)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Return the values of a batch's sampled tokens, 0 elsewhere: float32 [t], on the CPU."""

        def compute(forward_pass: Pass, part: Batch) -> torch.Tensor:
            with self.passes.inputs(forward_pass, part) as inputs:
                values: torch.Tensor = self.module(inputs.arguments, inputs.rows[part.sampled_mask])
                return values

        with resharded_at_end(self.module, self._mesh, self._trainer):
            return self.passes.sampled(batch, compute)


def load_frozen(spec: FrozenSpec, mesh: DeviceMesh, trainer: TrainerConfig) -> ShardedModel | ShardedValues:
    """Load a frozen model. A collective.

    Raises:
        SettingsError: transformers cannot load the model.
    """
    setting = f"{spec.role}.path"
    if spec.is_classifier:
        return ShardedValues(spec.directory, setting, mesh, trainer, is_trained=False)
    return ShardedModel(spec.directory, setting, mesh, trainer)

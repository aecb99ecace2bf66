"""Holds this rank's shard of a model: builds and loads its chunks, and creates runners and steppers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.transformer_config import TransformerConfig

from protocol.errors import SettingsError
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from trainer.config import OptimizerConfig, TrainerConfig
from trainer.megatron.checkpoint.description import TrainedModel
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.families.stages import stage_rules
from trainer.megatron.forward import Runner
from trainer.megatron.layers.experts.balance import set_balance
from trainer.megatron.layers.tensor_parallel import mark_split
from trainer.megatron.layout import Layout
from trainer.megatron.loading import load_checkpoint
from trainer.megatron.memory.activations import key_copies
from trainer.megatron.model import DTYPES, PackedModel, build_model, transformer_config, whole_part
from trainer.megatron.optimizer import is_distributed, wrap_model
from trainer.megatron.optimizer_step import ModelStepper
from trainer.megatron.parallel import Position


class ModelPart:
    """Shard of a model on this rank."""

    def __init__(
        self, spec: Architecture, position: Position, trainer: TrainerConfig, *, is_trained: bool = True
    ) -> None:
        """Configure megatron for the model.

        Raises:
            SettingsError: the model does not fit the layout, or its recomputation or balance settings.
        """
        self.spec, self.position, self._trainer = spec, position, trainer
        self.layout = Layout.of(position.config, spec.layers)
        self.config = transformer_config(spec, position, DTYPES[trainer.dtype])
        if is_trained:
            set_recompute(self.config, trainer, self.layout)
            set_balance(self.config, spec.experts, trainer)

    def build(self) -> list[PackedModel]:
        """Build this rank's chunks. A collective."""
        chunks = range(self.layout.chunks)
        return [build_model(self.spec, self.config, self.position, chunk=chunk) for chunk in chunks]

    def load(self, directory: Path, chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
        """Load a checkpoint into the chunks, and return their parameters by megatron's names.

        Raises:
            SettingsError: the checkpoint does not fit, see `load_checkpoint`.
        """
        parameters: dict[str, torch.Tensor] = dict(whole_part(chunks).named_parameters())
        mark_split(parameters, stage_rules(self.spec, self.layout, self.position.place.pp))
        load_checkpoint(directory, self.spec, parameters, self.layout, self.position.place)
        return parameters

    def runner(
        self, chunks: Sequence[Any], kind: type[Runner] = Runner, *, replays_routing: bool = False
    ) -> Any:
        """Return a runner of the chunks, of class `kind`."""
        return kind(
            chunks,
            self.spec,
            self.position,
            self._trainer.micro_batch_tokens,
            self._trainer.micro_batch_size,
            replays_routing=replays_routing,
            shares_prefixes=self._trainer.share_prefixes == "auto",
            copies=key_copies(self.spec, self._trainer),
        )

    def stepper(
        self,
        chunks: list[PackedModel],
        optimizer: OptimizerConfig,
        kind: type[Runner] = Runner,
        *,
        tokens: int,
        separate_masters: bool = False,
        replays_routing: bool = False,
    ) -> ModelStepper:
        """Return passes and optimizer of loaded chunks. A collective.

        Args:
            chunks: result of `build`.
            optimizer: settings of AdamW.
            kind: class of the runner.
            tokens: initial number of tokens per micro-batch.
            separate_masters: whether masters are separate for float32 too.
            replays_routing: as in `Runner`.
        """
        keep_input_gradient(chunks[0], self._trainer)
        fp32 = optimizer.grad_reduce_in_fp32
        wrapped = wrap_model(chunks, self.config, self.position, grad_reduce_in_fp32=fp32)
        runner = self.runner(wrapped, kind, replays_routing=replays_routing)
        return ModelStepper(runner, self.config, optimizer, tokens=tokens, separate_masters=separate_masters)

    def description(self, adapters: LoraConfig = NO_ADAPTERS) -> TrainedModel:
        """Return the description of a checkpoint of the model, or of its adapters."""
        distributed = is_distributed(self.position)
        return TrainedModel(self.spec, self.layout, self._trainer.dtype, adapters, distributed)


def set_recompute(config: TransformerConfig, trainer: TrainerConfig, layout: Layout) -> None:
    """Set megatron's recomputation fields before a model is built with `config`; no-op if off.

    The fields are set after the configuration's constructor, which warns of `core_attn` for any attention.

    Raises:
        SettingsError: the layers of a chunk do not divide into equal pieces.
    """
    if not trainer.recompute_granularity:
        return
    config.recompute_granularity = trainer.recompute_granularity
    if trainer.recompute_granularity == "selective":
        # megatron 0.16 mistakes every default except None for fp8, which needs TransformerEngine
        CheckpointWithoutOutput.__init__.__defaults__ = (None,)
        config.recompute_modules = list(trainer.recompute_modules)
        return
    pieces = trainer.recompute_num_layers
    for layers in sorted({len(chunk) for stage in layout.stages for chunk in stage}):
        if trainer.recompute_method == "uniform" and layers % pieces:
            raise SettingsError(
                f"setting trainer.recompute_num_layers: {pieces} does not divide the {layers} layers of a "
                "pipeline stage or chunk; choose a divisor, or trainer.recompute_method 'block'"
            )
    config.recompute_method, config.recompute_num_layers = trainer.recompute_method, pieces


def keep_input_gradient(model: GPTModel, trainer: TrainerConfig) -> None:
    """Make the first layer's input require a gradient, even if the embedding is frozen.

    A recomputed part gets gradients only if its input requires a gradient. Otherwise, the adapters of the
    first layer would silently not be trained.
    """
    if trainer.recompute_granularity and model.pre_process:
        model.embedding.register_forward_hook(_require_gradient)


def _require_gradient(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)
    return output

"""Holds this rank's part of a model that is never trained, in the layout of the policy."""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from protocol.errors import SettingsError
from trainer.backends.base import FrozenModel, FrozenSpec
from trainer.batch import Batch
from trainer.config import TrainerConfig
from trainer.megatron.families.experts import check_ranks
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.families.reading import read_architecture
from trainer.megatron.forward import Runner
from trainer.megatron.layers.experts.balance import set_balance
from trainer.megatron.layout import Layout
from trainer.megatron.loading import load_checkpoint
from trainer.megatron.memory.activations import key_copies
from trainer.megatron.memory.expected import FrozenShape, frozen_layout
from trainer.megatron.model import DTYPES, build_model, transformer_config, whole_part
from trainer.megatron.parallel import Position

Evaluate = Callable[[Runner, Batch], torch.Tensor]
"""(runner, batch) -> log-probabilities of the batch's tokens."""


class FrozenPart(FrozenModel):
    """A model that only gives log-probabilities."""

    def __init__(
        self, spec: FrozenSpec, position: Position, trainer: TrainerConfig, evaluate: Evaluate
    ) -> None:
        """Load this rank's part. A collective.

        Args:
            spec: which model.
            position: this rank's place in the policy's layout.
            trainer: dtype, and limits of a micro-batch.
            evaluate: makes the passes.

        Raises:
            SettingsError: the model is not supported, or does not fit the layout; names the setting.
        """
        self._evaluate = evaluate
        try:
            chunks, architecture, own = _loaded(spec, position, trainer)
        except SettingsError as error:
            raise SettingsError(f"setting {spec.role}.path: {error}") from error
        self._part = whole_part(chunks)
        self._runner = Runner(
            chunks,
            architecture,
            own,
            trainer.micro_batch_tokens,
            trainer.micro_batch_size,
            shares_prefixes=trainer.share_prefixes == "auto",
            copies=key_copies(architecture, trainer),
        )

    def logprobs(self, batch: Batch) -> torch.Tensor:
        return self._evaluate(self._runner, batch)

    def tensors(self) -> Sequence[torch.Tensor]:
        return list(self._part.parameters())


def _loaded(
    spec: FrozenSpec, position: Position, trainer: TrainerConfig
) -> tuple[Sequence[torch.nn.Module], Architecture, Position]:
    """Return the model's chunks, what it is, and this rank's place in its own division into layers."""
    architecture = read_architecture(spec.directory)
    parallel = frozen_layout(position.config)
    if architecture.experts.count:
        check_ranks(architecture.experts, parallel)
    places, own = Layout.of(parallel, architecture.layers), dataclasses.replace(position, config=parallel)
    config = transformer_config(architecture, own, DTYPES[trainer.dtype])
    still = dataclasses.replace(
        trainer, moe_aux_loss_coeff=0.0, moe_z_loss_coeff=0.0, moe_router_bias_update_rate=0.0
    )
    set_balance(config, architecture.experts, still)
    chunks = [build_model(architecture, config, own, chunk=chunk) for chunk in range(places.chunks)]
    part = whole_part(chunks).requires_grad_(False)
    load_checkpoint(spec.directory, architecture, dict(part.named_parameters()), places, own.place)
    return chunks, architecture, own


def shapes_of(specs: Sequence[FrozenSpec]) -> tuple[FrozenShape, ...]:
    """Return the facts that the memory of frozen models on the policy's ranks depends on.

    Raises:
        SettingsError: one is not supported; names the setting.
    """
    shapes = []
    for spec in specs:
        if spec.apart:
            continue
        try:
            shapes.append(FrozenShape(read_architecture(spec.directory), spec.offload))
        except SettingsError as error:
            raise SettingsError(f"setting {spec.role}.path: {error}") from error
    return tuple(shapes)

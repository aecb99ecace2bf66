"""Holds this rank's shard of a frozen model, in the layout of the policy."""

import dataclasses
from collections.abc import Sequence

import torch

from protocol.errors import SettingsError
from trainer.backends.base import FrozenModel, FrozenSpec
from trainer.batch import Batch
from trainer.config import TrainerConfig
from trainer.megatron.families.experts import check_ranks
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.families.reading import read_architecture, read_critic
from trainer.megatron.forward import Runner
from trainer.megatron.memory.expected import FrozenShape, frozen_layout
from trainer.megatron.model import whole_part
from trainer.megatron.parallel import Position
from trainer.megatron.part import ModelPart
from trainer.megatron.roles.value_runner import ValueRunner
from trainer.memory.oom_retry import OomRetry
from trainer.roles.row_scores import token_evaluator


def load_part(spec: FrozenSpec, position: Position, trainer: TrainerConfig, passes: OomRetry) -> FrozenModel:
    """Load this rank's shard of a frozen model. A collective.

    Args:
        spec: the frozen model.
        position: this rank's position in the policy's layout.
        trainer: dtype, and limits of a micro-batch.
        passes: out-of-memory retry of the model's passes.

    Raises:
        SettingsError: the model is not supported, or does not fit the layout. The message names the setting.
    """
    try:
        architecture, layout = _read(spec), frozen_layout(position.config)
        if architecture.experts.count:
            check_ranks(architecture.experts, layout)
        part = ModelPart(
            architecture, dataclasses.replace(position, config=layout), trainer, is_trained=False
        )
        chunks = part.build()
        parameters = part.load(spec.directory, chunks)
    except SettingsError as error:
        raise SettingsError(f"setting {spec.role}.path: {error}") from error
    whole_part(chunks).requires_grad_(False)
    runner = part.runner(chunks, ValueRunner if spec.is_classifier else Runner)

    def evaluate(batch: Batch) -> torch.Tensor:
        return passes.run_without_gradients(runner, batch, lambda: runner.evaluate(batch))

    return FrozenModel(token_evaluator(spec, evaluate), list(parameters.values()))


def shapes_of(specs: Sequence[FrozenSpec]) -> tuple[FrozenShape, ...]:
    """Return the shapes of the frozen models on the policy's ranks, for the expected memory.

    Raises:
        SettingsError: a model is not supported. The message names the setting.
    """
    shapes = []
    for spec in specs:
        if spec.is_remote:
            continue
        try:
            shapes.append(FrozenShape(_read(spec), spec.offload))
        except SettingsError as error:
            raise SettingsError(f"setting {spec.role}.path: {error}") from error
    return tuple(shapes)


def _read(spec: FrozenSpec) -> Architecture:
    return read_critic(spec.directory) if spec.is_classifier else read_architecture(spec.directory)

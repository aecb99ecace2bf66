"""Loads a Hugging Face checkpoint into a rank's parameters, reading only the rows that the rank holds."""

from collections.abc import Mapping
from pathlib import Path

import torch

from protocol.errors import SettingsError
from trainer.backends.safetensors_reader import SafetensorsReader
from trainer.megatron.convert.reshard import narrow_rows
from trainer.megatron.convert.rules import Rule, Segment
from trainer.megatron.families.decoder import EMBEDDING, OUTPUT, VALUE_HEAD, ignorable
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.families.stages import export_plan, stage_rules
from trainer.megatron.layout import Layout, Place

DTYPES = ("F64", "F32", "F16", "BF16")
"""Supported dtypes of stored weights. Weights of other dtypes are quantized and need scales."""
ROWS = 8192
"""Number of rows that are compared at a time."""


def load_checkpoint(
    model_dir: Path,
    architecture: Architecture,
    parameters: Mapping[str, torch.Tensor],
    layout: Layout,
    place: Place,
) -> None:
    """Fill this rank's parameters.

    Args:
        model_dir: directory of the checkpoint.
        architecture: architecture that its config.json describes.
        parameters: megatron name -> parameter of this rank; written in place, in its own dtype.
        layout: layout of the model on all ranks.
        place: place of this rank.

    Raises:
        SettingsError: the checkpoint has a tensor that no rule maps, lacks a tensor, or a shape differs.
    """
    rules = stage_rules(architecture, layout, place.pp)
    check_parameters(rules, parameters, layout)
    with SafetensorsReader(model_dir) as reader:
        check_names(reader, architecture, layout)
        with torch.no_grad():
            for rule in rules:
                parameter = parameters[rule.parameter].detach().zero_()
                number = layout.number_of(place, expert=rule.expert)
                for segment in rule.segments(layout.grid(expert=rule.expert)):
                    if segment.rank == number and segment.name in reader.names:
                        _read_segment(reader, parameter, rule.dim, segment)


def _read_segment(reader: SafetensorsReader, parameter: torch.Tensor, dim: int, segment: Segment) -> None:
    rows = reader.rows(segment.name, dim, segment.start, segment.length, segment.matrix)
    narrow_rows(parameter, dim, segment.local_start, segment.length, segment.local_matrix).copy_(rows)


def check_names(reader: SafetensorsReader, architecture: Architecture, layout: Layout) -> None:
    """Check that every tensor of the checkpoint has a rule, and that no tensor of the rules is missing.

    Raises:
        SettingsError: a tensor has no rule, is missing, or has another shape or dtype. The message names the
            tensor.
    """
    shapes = {plan.name: plan.shape for plan in export_plan(architecture, layout)}
    unmapped = sorted(name for name in reader.names - set(shapes) if not ignorable(architecture, name))
    if unmapped:
        raise SettingsError(
            f"{reader.model_dir}: no rule of {architecture.model_type} maps {_shortened_list(unmapped)}"
        )
    missing = sorted(set(shapes) - reader.names - set(VALUE_HEAD))
    if missing:
        raise SettingsError(f"{reader.model_dir} lacks {_shortened_list(missing)}, required by config.json")
    for name, shape in shapes.items():
        if name not in reader.names:
            continue
        if reader.shape(name) != shape:
            raise SettingsError(
                f"{reader.model_dir}: {name} has shape {reader.shape(name)}, but by config.json it should be "
                f"{shape}"
            )
        if reader.dtype(name) not in DTYPES:
            raise SettingsError(
                f"{reader.model_dir}: {name} has dtype {reader.dtype(name)}: supported are "
                f"{', '.join(DTYPES)}"
            )
    if architecture.tied and OUTPUT in reader.names:
        _check_tied(reader)


def _check_tied(reader: SafetensorsReader) -> None:
    """Check that the output layer equals the embedding, if a checkpoint stores both of tied weights."""
    shape = reader.shape(EMBEDDING)
    equal = reader.shape(OUTPUT) == shape and all(
        torch.equal(reader.rows(OUTPUT, 0, first, ROWS), reader.rows(EMBEDDING, 0, first, ROWS))
        for first in range(0, shape[0], ROWS)
    )
    if not equal:
        raise SettingsError(
            f"{reader.model_dir}: {OUTPUT} is not {EMBEDDING}, though config.json says tie_word_embeddings"
        )


def check_parameters(rules: list[Rule], parameters: Mapping[str, torch.Tensor], layout: Layout) -> None:
    """Check that each parameter has exactly one rule of its shape.

    Raises:
        SettingsError: parameters have no rule, several rules or another shape. The message names them.
    """
    names = [rule.parameter for rule in rules]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise SettingsError(f"more than one rule maps {_shortened_list(doubled)}")
    unmatched = sorted(set(names) ^ set(parameters))
    if unmatched:
        raise SettingsError(f"rules and model differ in {_shortened_list(unmatched)}")
    for rule in rules:
        shape = tuple(parameters[rule.parameter].shape)
        wanted = rule.local_shape(layout.grid(expert=rule.expert))
        if shape != wanted:
            raise SettingsError(f"{rule.parameter} has shape {shape}, its rule says {wanted}")


def _shortened_list(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

"""Saves and restores a rank's part of a run's state: masters, moments, steps, random states.

The state is read from and written to torch's optimizers directly, because megatron's checkpoint code for the
distributed optimizer rejects torch's AdamW on reload.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from trainer.megatron.checkpoint.description import (
    KINDS,
    LAYOUT,
    LOSS_SCALE,
    MASTER,
    RANDOM_CPU,
    RANDOM_CUDA,
    STEPS,
    VALUE,
    TrainedModel,
    part_name,
    rank_file,
)
from trainer.megatron.checkpoint.reading import CheckpointReader, read_description
from trainer.megatron.optimizer import MasterPart, Optimizer
from trainer.storage.host_state import HostCopies, HostState


def copy_part(
    copies: HostCopies,
    parameters: Mapping[str, torch.Tensor],
    optimizer: Optimizer,
    model: TrainedModel,
    rank: int,
) -> HostState:
    """Return this rank's checkpoint files, copied to host memory. The package's docstring lists the files.

    State that several ranks share is written by the first of them.

    Args:
        copies: makes the copies.
        parameters: trained parameters by megatron name.
        optimizer: optimizer with masters and moments.
        model: the trained model and its layout.
        rank: global rank of this process.
    """
    tensors = {STEPS: torch.tensor(optimizer.steps), RANDOM_CPU: torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors[RANDOM_CUDA] = torch.cuda.get_rng_state()
    scale = optimizer.loss_scale
    if scale is not None:
        tensors[LOSS_SCALE] = torch.tensor([scale.value, scale.finite_steps], dtype=torch.float64)
    names = {id(parameter): name for name, parameter in parameters.items()}
    written = _written(model, rank)
    for part in optimizer.parts():
        name = names[id(part.parameter)]
        if name in written:
            tensors[part_name(MASTER, name, part.start)] = part.master.detach().view(-1)
            state = part.optimizer.state.get(part.master, {})
            for kind in KINDS[1:]:
                if kind in state:
                    tensors[part_name(kind, name, part.start)] = state[kind].view(-1)
    first = _written(replace(model, distributed=False), rank)
    for name, parameter in parameters.items():
        if not parameter.requires_grad and name in first:
            tensors[part_name(VALUE, name, 0)] = parameter.detach().float().view(-1)
    texts = {LAYOUT: json.dumps(model.as_json(), indent=1)} if rank == 0 else {}
    return HostState({rank_file(rank): copies.copy_all(tensors.items())}, texts=texts)


def restore_part(
    directory: Path,
    parameters: Mapping[str, torch.Tensor],
    optimizer: Optimizer,
    model: TrainedModel,
    rank: int,
    *,
    fill: bool = True,
) -> None:
    """Load this rank's part of a checkpoint, bit for bit, from any saved layout.

    Random states are restored from the rank with the same number. A rank without saved states keeps its own.

    Args:
        directory: directory of the checkpoint.
        parameters, optimizer, model, rank: as in `copy_part`.
        fill: whether to write the parameters too.

    Raises:
        SettingsError: the checkpoint is of another model or format, or incomplete; the state is
            unchanged.
    """
    saved = read_description(directory)
    with CheckpointReader(directory, saved, model) as reader, torch.no_grad():
        parts: dict[int, list[MasterPart]] = {}
        for part in optimizer.parts():
            parts.setdefault(id(part.parameter), []).append(part)
            part.forget()
        place = model.layout.place_of(rank)
        rules = {rule.parameter: rule for rule in model.rules(place.pp)}
        for name, parameter in parameters.items():
            held = parts.get(id(parameter), [])
            for kind in reader.kinds if parameter.requires_grad else (VALUE,):
                is_filled = kind == VALUE or (fill and kind == MASTER)
                if not held and not is_filled:
                    continue
                start = 0 if is_filled else min(part.start for part in held)
                stop = parameter.numel() if is_filled else max(part.stop for part in held)
                flat = reader.flat(kind, rules[name], place, start, stop)
                if is_filled:
                    parameter.copy_(flat.view_as(parameter))
                for part in held:
                    part.set(kind, flat[part.start : part.stop], reader.steps)
        optimizer.steps = reader.steps
        _restore_rest(reader, optimizer, rank)


def _restore_rest(reader: CheckpointReader, optimizer: Optimizer, rank: int) -> None:
    """Load the loss scale and the random states, if saved."""
    scale = reader.tensor(0, LOSS_SCALE)
    if scale is not None and optimizer.loss_scale is not None:
        optimizer.loss_scale.value, optimizer.loss_scale.finite_steps = float(scale[0]), int(scale[1])
    random = reader.tensor(rank, RANDOM_CPU)
    if random is not None:
        torch.set_rng_state(random)
    random = reader.tensor(rank, RANDOM_CUDA)
    if random is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(random)


def _written(model: TrainedModel, rank: int) -> set[str]:
    """Return the parameters whose parts this rank writes."""
    layout = model.layout
    place = layout.place_of(rank)
    return {
        rule.parameter
        for rule in model.rules(place.pp)
        if model.distributed
        or rank == layout.holder_of(place.pp, layout.number_of(place, expert=rule.expert))
    }

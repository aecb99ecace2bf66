"""Compares an engine's tensors with the trainer's model before the model frees its own tensors."""

from collections.abc import Callable, Mapping, Sequence

import torch

from protocol.device.shared_layout import ROTARY
from protocol.device.slice_digests import bits_of
from protocol.errors import SettingsError, WeightError


def check_parameters(
    own: Mapping[str, torch.Tensor], masters: Mapping[str, torch.Tensor], engine: Mapping[str, torch.Tensor]
) -> None:
    """Compare an engine's weights with the model's parameters: names, dtypes, layouts and bits.

    Args:
        own: the model's parameters, dense.

    Raises:
        SettingsError: a name is missing on one side, or dtype, device, shape or strides differ.
        WeightError: the engine's bits differ from the rounded master.
    """
    _check_names("parameter", own, engine)
    for name, parameter in own.items():
        _check_kind(f"parameter {name}", parameter, engine[name])
    for name, parameter in own.items():
        if not _same_bits(masters[name].detach().to(parameter.dtype), engine[name]):
            raise WeightError(f"parameter {name}: the weights that the engine serves are not the trainer's")


def check_buffers(own: Mapping[str, torch.Tensor], engine: Mapping[str, torch.Tensor]) -> None:
    """Compare the buffers that a model has computed from its config with the engine's buffers.

    Raises:
        SettingsError: a buffer is missing on one side, or differs.
    """
    _check_names("buffer", own, engine)
    for name, buffer in own.items():
        _check_kind(f"buffer {name}", buffer, engine[name])
        if not _same_bits(buffer, engine[name]):
            raise SettingsError(
                f"buffer {name}: the engine's values are not those that the model's config makes"
            )


def take_parameters(own: Mapping[str, torch.Tensor], engine: Mapping[str, torch.Tensor]) -> None:
    """Point a model's parameters at the engine's memory, and free the previous memory.

    The parameters stay the same objects.
    """
    for name, parameter in own.items():
        parameter.data = engine[name]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # lets the engine allocate the memory


def _check_names(kind: str, own: Mapping[str, torch.Tensor], engine: Mapping[str, torch.Tensor]) -> None:
    for name in sorted(own.keys() ^ engine.keys()):
        has, lacks = (
            ("the trainer's model", "the engine") if name in own else ("the engine", "the trainer's model")
        )
        raise SettingsError(f"{kind} {name}: {has} has it, {lacks} does not")


def _check_kind(what: str, own: torch.Tensor, other: torch.Tensor) -> None:
    for fact in ("dtype", "device", "shape"):
        here, there = getattr(own, fact), getattr(other, fact)
        if here != there:
            raise SettingsError(
                f"{what}: {fact} {_plain(there)} in the engine, {_plain(here)} in the trainer"
            )
    if own.stride() != other.stride():
        raise SettingsError(f"{what}: strides {other.stride()} in the engine, {own.stride()} in the trainer")


def _plain(fact: object) -> object:
    return list(fact) if isinstance(fact, torch.Size) else fact


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits_of(a.detach()), bits_of(b.detach()))


ROWS = 4096
"""Number of positions whose angles are compared at a time."""
Angles = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Returns cosine and sine of each rotary angle of positions [T], each [T, R / 2] for R dimensions."""


def check_model_buffers(
    own: Mapping[str, torch.Tensor], engine: Mapping[str, torch.Tensor], rotaries: Sequence[Angles]
) -> None:
    """Compare the buffers that a model has computed from its config with an engine's buffers.

    Args:
        engine: the engine's buffers by name; a name that ends with `ROTARY` is a table of angles.

    Raises:
        SettingsError: a buffer is missing on one side, or differs.
    """
    tables = {name: tensor for name, tensor in engine.items() if name.endswith(ROTARY)}
    others = {name: tensor for name, tensor in engine.items() if name not in tables}
    check_buffers({name: own[name] for name in own.keys() & others.keys()} if tables else own, others)
    matched = {each for name, table in tables.items() for each in _matching(rotaries, name, table)}
    if tables and (lacking := [each for each in range(len(rotaries)) if each not in matched]):
        raise SettingsError(
            f"buffer {next(iter(tables))}: of the {len(rotaries)} rotary embeddings that the model's config "
            f"makes, the engine has no angles of number {lacking[0] + 1}"
        )


@torch.no_grad()
def _matching(rotaries: Sequence[Angles], name: str, table: torch.Tensor) -> list[int]:
    """Return the indices of the rotary embeddings that have the angles of a table.

    Args:
        table: [positions, R], cosines then sines of the angles.

    Raises:
        SettingsError: no embedding has these angles.
    """
    if not rotaries:
        raise SettingsError(
            f"buffer {name} of the engine: the trainer's model has no rotary embedding to compare it with"
        )
    matching = list(range(len(rotaries)))
    for start in range(0, len(table), ROWS):
        rows = table[start : start + ROWS].float()
        positions = torch.arange(start, start + len(rows), device=table.device)
        made = {each: torch.cat(rotaries[each](positions), dim=1) for each in matching}
        found = {each: angles for each, angles in made.items() if angles.shape == rows.shape}
        if not found:
            raise SettingsError(
                f"buffer {name}: for {rows.shape[1]} dimensions in the engine, for "
                f"{made[matching[0]].shape[1]} in the trainer"
            )
        # One rounding to the table's dtype, plus float32 errors of angles up to start + len(rows) radians:
        # powers differ between GPU and host.
        bound = 2 * torch.finfo(table.dtype).eps + 8 * (start + len(rows)) * torch.finfo(torch.float32).eps
        differences = {each: float((rows - angles).abs().max()) for each, angles in found.items()}
        matching = [each for each, difference in differences.items() if difference <= bound]
        if not matching:
            raise SettingsError(
                f"buffer {name}: the engine's rotary angles are {min(differences.values()):g} from those "
                "that the model's config makes"
            )
    return matching

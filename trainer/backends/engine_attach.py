"""Validates an engine's tensors against the model before the model frees its own."""

from collections.abc import Mapping

import torch

from protocol.device.digests import bits_of
from protocol.errors import SettingsError, WeightError


def check_parameters(
    own: Mapping[str, torch.Tensor], masters: Mapping[str, torch.Tensor], engine: Mapping[str, torch.Tensor]
) -> None:
    """Compare an engine's weights with the model's parameters: names, dtypes, layouts and bits.

    Args:
        own: the model's parameters, dense.
        masters: fp32 masters of the weights that the engine is to serve.
        engine: its live weights.

    Raises:
        SettingsError: a name is not on both sides, or dtype, device, shape or strides differ.
        WeightError: the bits are not those that the master makes.
    """
    _check_names("parameter", own, engine)
    for name, parameter in own.items():
        _check_kind(f"parameter {name}", parameter, engine[name])
    for name, parameter in own.items():
        if not _same_bits(masters[name].detach().to(parameter.dtype), engine[name]):
            raise WeightError(f"parameter {name}: the weights that the engine serves are not the trainer's")


def check_buffers(own: Mapping[str, torch.Tensor], engine: Mapping[str, torch.Tensor]) -> None:
    """Compare the buffers that a model has computed from its config with the engine's.

    Raises:
        SettingsError: a buffer is not on both sides, or differs.
    """
    _check_names("buffer", own, engine)
    for name, buffer in own.items():
        _check_kind(f"buffer {name}", buffer, engine[name])
        if not _same_bits(buffer, engine[name]):
            raise SettingsError(
                f"buffer {name}: the engine's values are not those that the model's config makes"
            )


def take_parameters(own: Mapping[str, torch.Tensor], engine: Mapping[str, torch.Tensor]) -> None:
    """Point a model's parameters, which stay the same objects, at the engine's memory, and free their own."""
    for name, parameter in own.items():
        parameter.data = engine[name]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # so that the engine can allocate it


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

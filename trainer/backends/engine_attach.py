"""Whether an engine's tensors are those that a model computes with: looked at before the model's own are let
go."""

from collections.abc import Mapping

import torch

from protocol.device.digests import bits_of
from protocol.errors import SettingsError, WeightError


def check_parameters(
    own: Mapping[str, torch.Tensor], masters: Mapping[str, torch.Tensor], engine: Mapping[str, torch.Tensor]
) -> None:
    """Compare names, kinds and bits.

    Args:
        own: the model's parameters, dense.
        masters: of the weights that the engine is to serve.
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
            raise WeightError(
                f"parameter {name}: what the engine serves are other weights than the trainer's"
            )


def check_buffers(own: Mapping[str, torch.Tensor], engine: Mapping[str, torch.Tensor]) -> None:
    """Compare what a model has computed from its config with what the engine has.

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
    """Have a model's parameters, which stay the same objects, lie where the engine has them; their own memory
    is given back."""
    for name, parameter in own.items():
        parameter.data = engine[name]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # it is the engine's to use


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

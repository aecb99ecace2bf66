"""Checks names and options that a user wrote against those that exist, and suggests the nearest one."""

import dataclasses
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec

from protocol.errors import SettingsError

T = TypeVar("T")


def checked_name(name: str, known: Iterable[str], what: str) -> str:
    """Return `name` if it is one of `known`.

    Raises:
        SettingsError: it is not; names `what` it should be and suggests the nearest known name, or lists all.
    """
    names = list(known)
    if name in names:
        return name
    raise SettingsError(f"{what} {name!r} is not known; {did_you_mean(name, names)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return what to append to "NAME is not known; ": the most similar known name, or all of them."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(names)}"


def checked_options(kind: type[T], values: Mapping[str, Any], what: str) -> T:
    """Build the dataclass `kind` from a table of the settings.

    Raises:
        SettingsError: a key is unknown (suggests the nearest one) or a value has the wrong type.
    """
    _check_keys(kind, values, what)
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{what}: {error}") from None


def _check_keys(kind: Any, values: Mapping[str, Any], what: str) -> None:
    """Refuse unknown keys, in nested dataclasses too."""
    fields = {field.name: field.type for field in dataclasses.fields(kind)}
    for key, value in values.items():
        inner = fields[checked_name(key, fields, f"{what}: option")]
        if dataclasses.is_dataclass(inner) and isinstance(value, Mapping):
            _check_keys(inner, value, f"{what}: {key}")

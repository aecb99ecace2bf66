"""Finds what a user named in a registry, checks options, and suggests the nearest known name."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any, TypeVar

import msgspec

from protocol.errors import SettingsError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """Implementation in a registry. Subclasses add its capabilities as fields."""

    path: str
    """`MODULE:NAME` of its class or function, or `MODULE`."""


E = TypeVar("E", bound=Entry)


class Registry(dict[str, E]):
    """Implementations by name. The module of one is imported when it is loaded.

    Where users may bring their own, `MODULE:NAME` is a name, too, and has an entry.
    """

    def __init__(self, entries: Mapping[str, E], own: Callable[[str], E] | None = None) -> None:
        """Args: entries: by name; own: makes the entry of a `MODULE:NAME`, None where there can be none."""
        super().__init__(entries)
        self._own = own

    def __missing__(self, name: str) -> E:
        """Return the entry of a user's own implementation; called by `[]` for other names."""
        if self._own is None or not is_own(name):
            raise KeyError(name)
        return self._own(name)

    def find(self, name: str, what: str) -> E:
        """Return the entry called `name`.

        Raises:
            SettingsError: there is none; arguments and message are those of `checked_name`.
        """
        return self[name if self._own is not None and is_own(name) else checked_name(name, self, what)]

    def having(self, capability: str) -> tuple[str, ...]:
        """Return the names of the entries whose field `capability` is neither false nor empty."""
        return tuple(name for name, entry in self.items() if getattr(entry, capability))


def is_own(name: str) -> bool:
    """Return whether a name is a user's `MODULE:NAME`, which `protocol.user_code` imports."""
    return ":" in name


def load(path: str) -> Any:
    """Return the class or function that `MODULE:NAME` names, or the module that `MODULE` names.

    Raises:
        ImportError: the module, or one that it imports, is not installed or is broken.
    """
    module, _, name = path.partition(":")
    found = import_module(module)
    return getattr(found, name) if name else found


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
    close = close or [full for full in names if _abbreviates(name, full)][:1]
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


def _abbreviates(name: str, full: str) -> bool:
    """Return whether a name, such as tp, is made of initials of a full one, tensor_model_parallel_size."""
    initials = iter(word[:1] for word in full.split("_"))
    return len(name) > 1 and name[0] == full[:1] and all(letter in initials for letter in name)

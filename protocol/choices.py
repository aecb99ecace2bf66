"""Looks up implementations by the name in a setting, and suggests the nearest known name."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any, TypeVar

from protocol.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Entry:
    """Implementation in a registry. Subclasses add its capabilities as fields."""

    path: str
    """`MODULE:NAME` of the class or function, or `MODULE`."""


E = TypeVar("E", bound=Entry)


class Registry(dict[str, E]):
    """Implementations by name; each module is imported when its entry is loaded.

    A registry with an `own` factory also accepts a user's `MODULE:NAME`.
    """

    def __init__(self, entries: Mapping[str, E], own: Callable[[str], E] | None = None) -> None:
        """Create a registry.

        Args:
            entries: name -> entry.
            own: returns the entry of a user's `MODULE:NAME`; None: such names are unknown.
        """
        super().__init__(entries)
        self._own = own

    def __missing__(self, name: str) -> E:
        """Return the entry of a user's own implementation; called by `[]` for names that are not built in."""
        if self._own is None or not is_own(name):
            raise KeyError(name)
        return self._own(name)

    def find(self, name: str, what: str) -> E:
        """Return the entry called `name`.

        Raises:
            SettingsError: the registry has no such entry; `checked_name` builds the message from `what`.
        """
        return self[name if self.has(name) else checked_name(name, self, what)]

    def has(self, name: str) -> bool:
        """Return whether a setting may be `name`: an entry, or a user's own implementation."""
        return name in self or (self._own is not None and is_own(name))

    def having(self, capability: str) -> tuple[str, ...]:
        """Return the names of the entries whose field `capability` is neither false nor empty."""
        return tuple(name for name, entry in self.items() if getattr(entry, capability))


@dataclass(frozen=True, slots=True)
class NameIn:
    """Mark of a field that names an entry: `Annotated[str, Predicate(NameIn("MODULE:REGISTRY"))]`.

    The first check imports the registry, because the registry's module may import the module of the field.
    """

    path: str

    @property
    def registry(self) -> Registry[Any]:
        found: Registry[Any] = load(self.path)
        return found

    def __call__(self, name: str) -> bool:
        """Return whether a setting may have this name."""
        return self.registry.has(name)


def is_own(name: str) -> bool:
    """Return whether a name is a user's `MODULE:NAME`, which `protocol.user_code` imports."""
    return ":" in name


def load(path: str) -> Any:
    """Return the class or function that `MODULE:NAME` names, or the module that `MODULE` names.

    Raises:
        ImportError: the module, or a module that it imports, is broken or not installed.
    """
    module, _, name = path.partition(":")
    found = import_module(module)
    return getattr(found, name) if name else found


def checked_name(name: str, known: Iterable[str], what: str) -> str:
    """Return `name` if it is one of `known`.

    Raises:
        SettingsError: the name is unknown. The message begins with `what` and suggests the nearest known
            name, or lists all names.
    """
    names = list(known)
    if name in names:
        return name
    raise SettingsError(f"{what} {name!r} is not known; {did_you_mean(name, names)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the suggestion that follows "NAME is not known; ": the most similar known name, or all names."""
    names = sorted(known)
    close = [full for full in names if full.lower() == name.lower()]
    close = close or get_close_matches(name, names, n=1, cutoff=0.5)
    close = close or [full for full in names if _abbreviates(name, full)][:1]
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(names)}"


def _abbreviates(name: str, full: str) -> bool:
    """Return whether `name` abbreviates `full` by initials, such as tp for tensor_model_parallel_size."""
    initials = iter(word[:1] for word in full.split("_"))
    return len(name) > 1 and name[0] == full[:1] and all(letter in initials for letter in name)

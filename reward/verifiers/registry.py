"""Makes verifiers by name."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from protocol.choices import checked_name, checked_options
from protocol.errors import RewardError, SettingsError

VERIFIERS = (
    "exact_match",
    "json_schema",
    "last_integer",
    "math",
    "positions",
    "python_tests",
    "reasoning_gym",
)
"""Modules in `reward/verifiers/`; only the worker processes that run one import it."""

Score = Callable[[str, str, Mapping[str, Any]], float]
"""(prompt_text, response, metadata) -> score."""


def checked_verifier(name: str) -> str:
    """Return the module of a verifier; a name with a dot is a module of the user.

    Raises:
        SettingsError: the name has no dot and is unknown; suggests the nearest one.
    """
    if "." in name:
        return name
    return f"reward.verifiers.{checked_name(name, VERIFIERS, 'setting reward.verifiers: verifier')}"


def make_verifier(name: str, options: Mapping[str, Any]) -> Score:
    """Return a verifier with its options.

    Raises:
        SettingsError: the name or an option is unknown (suggests the nearest one), or the module cannot be
            imported.
    """
    path = checked_verifier(name)
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        raise SettingsError(f"verifier {name} cannot be imported: {error}") from None
    bound = checked_options(module.Options, options, f"verifier {name}")

    def score(prompt_text: str, response: str, metadata: Mapping[str, Any]) -> float:
        return float(module.score(prompt_text, response, metadata, bound))

    return score


def required(metadata: Mapping[str, Any], field: str) -> Any:
    """Return a field of the metadata that a verifier needs.

    Raises:
        RewardError: it is missing; names the fields that exist.
    """
    if metadata.get(field) is None:
        raise RewardError(
            f"the metadata has no field {field!r}, but {', '.join(sorted(map(str, metadata))) or 'none'}"
        )
    return metadata[field]

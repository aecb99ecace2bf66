"""Defines the settings of a named prompt source: a mixture entry or an evaluation set."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Interval

from protocol.choices import is_own
from protocol.errors import SettingsError
from protocol.paths import HUB_NAME, PathMark

_ROW_SETTINGS = (
    "path",
    "subset",
    "split",
    "revision",
    "prompt_field",
    "answer_field",
    "template",
    "answer_pattern",
    "pass_rate_field",
    "min_pass_rate",
    "max_pass_rate",
    "easy_first",
)
_UNUSED: Mapping[str, Sequence[str]] = {
    "hf": ("families", "params", "options"),
    "jsonl": ("subset", "split", "revision", "families", "params", "options"),
    "reasoning_gym": (*_ROW_SETTINGS, "options"),
    "textarena": (*_ROW_SETTINGS, "held_out_path", "options"),
}
_UNUSED_BY_OWN = ("path", "held_out_path", "subset", "split", "revision", "families", "params")
GENERATED = ("reasoning_gym", "textarena")
"""Sources that generate prompts, with different ones for training and evaluation."""
PLACE = ("subset", "split", "revision")
"""Settings that belong to a path."""
HELD_OUT = "held_out"
"""Name of the evaluation set defined by `[prompts]` itself."""


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """Named prompt source. Unset fields inherit from `[prompts]`."""

    name: str = ""
    """Name of the source: lower-case letters, digits, `-` and `_`."""
    source: str | None = None
    """As `prompts.source`."""
    path: Annotated[str | None, PathMark(names=HUB_NAME)] = None
    """As `prompts.path`."""
    subset: str | None = None
    """As `prompts.subset`."""
    split: str | None = None
    """As `prompts.split`."""
    revision: str | None = None
    """As `prompts.revision`."""
    prompt_field: str | None = None
    """As `prompts.prompt_field`."""
    answer_field: str | None = None
    """As `prompts.answer_field`."""
    template: str | None = None
    """As `prompts.template`."""
    answer_pattern: str | None = None
    """As `prompts.answer_pattern`."""
    families: tuple[str, ...] | None = None
    """As `prompts.families`."""
    params: dict[str, dict[str, Any]] | None = None
    """As `prompts.params`."""
    options: dict[str, Any] | None = None
    """As `prompts.options`."""


@dataclass(frozen=True, slots=True)
class MixtureConfig(SourceConfig):
    """Mixture entry. Unset fields inherit from `[prompts]`."""

    weight: Annotated[float, Interval(gt=0, le=1e9)] = 1.0
    """Relative weight. The source's share of the prompts is its weight divided by the sum of all weights."""
    count: Annotated[int | None, Interval(ge=0, le=2**30)] = None
    """As `prompts.count`."""
    passes: Annotated[int | None, Interval(ge=0, le=2**30)] = None
    """As `prompts.passes`. The mixture ends when the first source runs out."""
    held_out: Annotated[int | None, Interval(ge=0, le=2**20)] = None
    """As `prompts.held_out`."""


@dataclass(frozen=True, slots=True)
class HeldOutConfig(SourceConfig):
    """Evaluation set of prompts. Unset fields inherit from `[prompts]`."""

    limit: Annotated[int, Interval(ge=0, le=2**20)] = 0
    """Maximum prompts of the set, a fixed random choice. 0: `eval.prompts`."""


def unused_by(source: str) -> Sequence[str]:
    """Return the settings that a source does not use.

    They are refused if set explicitly; a named source may inherit them.
    """
    return _UNUSED_BY_OWN if is_own(source) else _UNUSED.get(source, ())


def check_names(entries: Sequence[SourceConfig], what: str) -> None:
    """Check that each entry has a valid, unique name.

    Args:
        entries: entries of one array of tables.
        what: name of the array in the settings.

    Raises:
        SettingsError: a name is empty, has invalid characters, is not unique, or is `held_out`.
    """
    names = {HELD_OUT}
    for number, entry in enumerate(entries):
        if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,62}", entry.name):
            raise SettingsError(
                f"setting {what}.{number}.name: {entry.name!r} must be 1 to 63 lower-case letters, digits, "
                "'-' and '_', such as \"gsm8k\""
            )
        if entry.name in names:
            raise SettingsError(
                f"setting {what}.{number}.name: {entry.name!r} is taken; give each a name of its own"
            )
        names.add(entry.name)

"""Makes questions and answers from the fields of a row: templates and answer patterns."""

import re
import string
from collections.abc import Mapping
from typing import Any

from protocol.errors import SettingsError

TemplateParts = tuple[tuple[str, str], ...]
"""Pieces of a template: a literal text, and the field that follows it, or an empty string."""


def parse_template(template: str) -> TemplateParts:
    """Return the pieces of `prompts.template`.

    Raises:
        SettingsError: a brace has no counterpart, or braces hold more than the name of a field.
    """
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise SettingsError(
            f"setting prompts.template: {error} in {template!r}; write {{{{ and }}}} for braces"
        ) from None
    for _, name, spec, conversion in pieces:
        if name is not None and (not name.isidentifier() or spec or conversion):
            raise SettingsError(
                f"setting prompts.template: {{{name}}} is not the name of a field alone in {template!r}; "
                "write {{ and }} for braces"
            )
    return tuple((literal, name or "") for literal, name, _, _ in pieces)


def fill_template(parts: TemplateParts, row: Mapping[str, Any], where: str) -> str:
    """Return the text of a template for a row.

    Raises:
        SettingsError: the row lacks a field, or has something else than text or a number there; names
            `where`.
    """
    return "".join(literal + (_text(row, name, where) if name else "") for literal, name in parts)


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return `prompts.answer_pattern`, compiled. Raises SettingsError, also without exactly one group."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise SettingsError(f"setting prompts.answer_pattern: {pattern!r}: {error}") from None
    if compiled.groups != 1:
        raise SettingsError(
            f"setting prompts.answer_pattern: {pattern!r} has {compiled.groups} groups; put one pair of "
            "parentheses around the answer, such as '#### (.+)', and write (?: for others"
        )
    return compiled


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    if name not in row:
        has = ", ".join(sorted(map(str, row))) or "none"
        raise SettingsError(f"{where}: prompts.template names the field {name!r}, which is not one of {has}")
    value = row[name]
    if not isinstance(value, str | int | float):
        raise SettingsError(
            f"{where}: the field {name!r} of prompts.template is {type(value).__name__}; "
            "it has to be text or a number"
        )
    return str(value)

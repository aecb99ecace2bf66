"""Scores 1 if the response is JSON that a schema validates, else 0."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import referencing
from jsonschema.exceptions import SchemaError
from jsonschema.validators import Draft202012Validator, validator_for

from protocol.errors import RewardError
from reward.verifiers.fenced_blocks import last_block
from reward.verifiers.registry import required

DEEP = 64
"""Nesting depth beyond which a recursion error is attributed to the response instead of the schema."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `json_schema`."""

    key: str = "schema"
    """Field of the metadata with the schema, as an object or as JSON text."""
    schema: dict[str, Any] = field(default_factory=dict)
    """One schema for all prompts, instead of a schema in the metadata."""
    fenced: bool = True
    """Parse the last ``` block of the response, if there is one."""


def score(prompt_text: str, response: str, metadata: Mapping[str, Any], options: Options) -> float:
    """Return 1 if the response is valid, else 0; references to other documents are not resolved.

    A response that cannot be checked, because of deep nesting or a huge number, scores 0.

    Raises:
        RewardError: the schema is missing or invalid.
    """
    schema = options.schema or required(metadata, options.key)
    try:
        schema = msgspec.json.decode(schema) if isinstance(schema, str) else schema
        kind = validator_for(schema, default=Draft202012Validator)
        kind.check_schema(schema)
    except (msgspec.DecodeError, SchemaError, TypeError, RecursionError) as error:
        raise RewardError(f"the schema is wrong: {str(error)[:300]}") from error
    block = last_block(response, ("json",)) if options.fenced else None
    try:
        value = msgspec.json.decode(response if block is None else block)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return 0.0
    try:
        return float(kind(schema, registry=referencing.Registry()).is_valid(value))
    except OverflowError:  # an integer with hundreds of digits where the schema has a decimal
        return 0.0
    except RecursionError:
        if _is_deep(value):
            return 0.0
        raise RewardError("the schema is wrong: it refers to itself without end") from None


def _is_deep(value: Any) -> bool:
    """Return whether a JSON value has more than `DEEP` levels."""
    level = [value]
    for _ in range(DEEP):
        level = [
            item
            for each in level
            if isinstance(each, (dict, list))
            for item in (each.values() if isinstance(each, dict) else each)
        ]
    return bool(level)

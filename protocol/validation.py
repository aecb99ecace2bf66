"""Builds the dataclasses of settings from tables with pydantic, and reports every problem on one line.

The range of a number is on its field: `Annotated[int, Interval(ge=0, le=1000)]`. A choice is a `Literal`, an
enum, or a name in a registry (`protocol.choices.NameIn`). Unknown fields, NaN and infinities are refused.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import GenericAlias, MappingProxyType
from typing import Any, TypeVar, get_args, get_type_hints

from annotated_types import Interval, Predicate
from pydantic import ConfigDict, TypeAdapter, ValidationError

from protocol.choices import NameIn, did_you_mean
from protocol.errors import SettingsError

T = TypeVar("T")
CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False)
TYPE_MESSAGES = {"tuple_type": "expected a list, in brackets", "dataclass_type": "expected a table, {fields}"}
"""Error type of pydantic -> message, where pydantic's message names Python types."""
RANGE_ERRORS = frozenset(
    {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"}
)
"""Error types of pydantic for a number outside its range."""


class WrongSettings(SettingsError):
    """Settings with wrong names, types or values; reports all problems together."""

    def __init__(self, problems: Sequence[str]):
        super().__init__("; ".join(problems))
        self.problems = problems


def validated(
    kind: type[T],
    values: Mapping[str, Any],
    prefix: str = "setting ",
    secret: str = "",
    absent: Mapping[str, str] = MappingProxyType({}),
) -> T:
    """Build a dataclass from tables.

    Args:
        values: field -> value; the value of an inner dataclass is a table.
        prefix: text before the names of fields in messages.
        secret: field whose values are left out of messages.
        absent: name of a field of another library that does not exist here -> reason, or what to set instead.

    Raises:
        WrongSettings: a value is invalid; each problem is a line with field, value and choices.
    """
    plain: type = kind
    truths = dict(_bools_for_numbers(values, kind, ()))
    lines = [
        f"{prefix}{'.'.join(map(str, path))}: expected a number (got {str(value).lower()})"
        for path, value in truths.items()
    ]
    try:
        built: tuple[T] = _adapter(plain).validate_python((values,))
    except ValidationError as error:
        others = [item for item in error.errors() if item["loc"][1:] not in truths]
        lines += [_problem(item, kind, prefix, secret, absent) for item in others]
    if lines:
        raise WrongSettings(lines)
    return built[0]


def check_range(kind: type, name: str, value: float, what: str) -> None:
    """Check a value against the range of the field `name` of the dataclass `kind`.

    Raises:
        SettingsError: the value is out of range; the message begins with `what` and states value and range.
    """
    try:
        _field_adapter(kind, name).validate_python(value)
    except ValidationError:
        raise SettingsError(_out_of_range(what, value, field_types(kind)[name])) from None


def range_of(hint: Any) -> Interval | None:
    """Return the range in the type of a field; None if the type has no range."""
    return next((item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Interval)), None)


def names_of(hint: Any) -> Iterable[str]:
    """Return the names in the registry of a field's type; empty if the type has no registry."""
    marks = [item.func for item in getattr(hint, "__metadata__", ()) if isinstance(item, Predicate)]
    return next((mark.registry for mark in marks if isinstance(mark, NameIn)), ())


def describe_range(limits: Interval) -> str:
    """Return a range as text, such as "between 0 and 1000" or "above 0 and at most 1"."""
    if limits.ge is not None and limits.le is not None:
        return f"between {_plain(limits.ge)} and {_plain(limits.le)}"
    ends = {"above": limits.gt, "at least": limits.ge, "below": limits.lt, "at most": limits.le}
    return " and ".join(f"{word} {_plain(end)}" for word, end in ends.items() if end is not None)


@cache
def field_types(kind: type) -> Mapping[str, Any]:
    """Return field -> type, including annotations, for the fields of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def inner_dataclass(hint: Any) -> type | None:
    """Return the dataclass in a field's type: `X`, `X | None` or `tuple[X, ...]`; None if it has none."""
    for item in (hint, *get_args(hint)):
        if isinstance(item, type) and dataclasses.is_dataclass(item):
            return item
    return None


def type_at(path: Iterable[str | int], kind: type) -> Any:
    """Return the type of a setting of the dataclass `kind`; None if the setting does not exist.

    Numbers in the path are array indices.
    """
    hint: Any = kind
    for part in path:
        if isinstance(part, int):
            hint = next(iter(get_args(hint)), None)
        else:
            inner = inner_dataclass(hint)
            hint = field_types(inner).get(part) if inner else None
    return hint


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    alone: Any = GenericAlias(tuple, (kind,))  # pydantic takes no configuration for a bare dataclass
    return TypeAdapter(alone, config=CONFIG)


@cache
def _field_adapter(kind: type, name: str) -> TypeAdapter[Any]:
    return TypeAdapter(field_types(kind)[name], config=CONFIG)


def _bools_for_numbers(
    value: Any, hint: Any, path: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], bool]]:
    """Yield path and value of each bool in a number field; pydantic would convert bools to 1 or 0."""
    if isinstance(value, Mapping) and (inner := inner_dataclass(hint)):
        for key, item in value.items():
            yield from _bools_for_numbers(item, field_types(inner).get(key), (*path, key))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _bools_for_numbers(item, next(iter(get_args(hint)), None), (*path, place))
    elif isinstance(value, bool):
        plain = getattr(hint, "__origin__", hint)
        kinds = {plain, *get_args(plain)}
        if bool not in kinds and kinds & {int, float}:
            yield path, value


def _problem(
    error: Mapping[str, Any], kind: type, prefix: str, secret: str, absent: Mapping[str, str]
) -> str:
    """Return one line for an entry of pydantic's `ValidationError.errors()`."""
    path, value = error["loc"][1:], error["input"]  # without the index in the tuple
    setting = prefix + ".".join(map(str, path))
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, SettingsError):  # a section's own check; its message names the setting
        return str(cause)
    if error["type"] == "unexpected_keyword_argument":
        if (reason := absent.get(str(path[-1]))) is not None:
            return f"{setting} does not exist: {reason}"
        inner = inner_dataclass(type_at(path[:-1], kind))
        return f"{setting} is not known; {did_you_mean(str(path[-1]), field_types(inner) if inner else ())}"
    if error["type"] in ("literal_error", "enum"):
        names = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        return f"{setting}: {value!r} is not known; {did_you_mean(str(value), names)}"
    hint = type_at(path, kind)
    if error["type"] == "predicate_failed":
        return f"{setting}: {value!r} is not known; {did_you_mean(value, names_of(hint))}"
    if error["type"] in RANGE_ERRORS and range_of(hint):
        return _out_of_range(setting, value, hint)
    got = "" if secret and path[:1] == (secret,) else f" (got {value!r})"
    inner = inner_dataclass(hint)
    fields = f"such as {{ {next(iter(field_types(inner)))} = ... }}" if inner else ""
    return f"{setting}: {TYPE_MESSAGES.get(error['type'], error['msg']).format(fields=fields)}{got}"


def _out_of_range(what: str, value: Any, hint: Any) -> str:
    limits = range_of(hint)
    assert limits is not None
    return f"{what}: {value} is not {describe_range(limits)}"


def _plain(limit: Any) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:.15g}"

"""Checks numbers of the settings against the range that stands on their field.

A range is a constraint of msgspec on a field of a dataclass: `Annotated[int, Meta(ge=0, le=1000)]`. No range
contains nan or an infinity.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_type_hints

from msgspec import Meta

from protocol.errors import SettingsError


@cache
def ranges_of(kind: type) -> Mapping[str, Meta]:
    """Return field -> range, for every field of the dataclass `kind` that has one."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for item in getattr(hint, "__metadata__", ()):
            if isinstance(item, Meta):
                found[name] = item
    return found


def check_range(kind: type, name: str, value: float, what: str) -> None:
    """Check a value against the range of the field `name` of the dataclass `kind`.

    Raises:
        SettingsError: the value is outside; the message begins with `what` and states value and range.
    """
    limits = ranges_of(kind)[name]
    inside = (
        (limits.ge is None or value >= limits.ge)
        and (limits.gt is None or value > limits.gt)
        and (limits.le is None or value <= limits.le)
        and (limits.lt is None or value < limits.lt)
    )
    if not inside:
        raise SettingsError(f"{what}: {value} is not {describe_range(limits)}")


def check_ranges(config: Any, prefix: str) -> None:
    """Check every number of a dataclass, and of the dataclasses in its fields, against its range.

    Raises:
        SettingsError: a number is outside; the message names it `setting PREFIX.FIELD`.
    """
    for error in range_errors(config, prefix):
        raise error


def range_errors(config: Any, prefix: str) -> Iterator[SettingsError]:
    """Yield all errors; `check_ranges` raises the first."""
    kind: type = type(config)
    for field in dataclasses.fields(config):
        value, dotted = getattr(config, field.name), f"{prefix}.{field.name}" if prefix else field.name
        if value is None:
            continue
        if field.name in ranges_of(kind):
            try:
                check_range(kind, field.name, value, f"setting {dotted}")
            except SettingsError as error:
                yield error
            continue
        for name, item in _parts(value, dotted):
            yield from range_errors(item, name)


def describe_range(limits: Meta) -> str:
    """Return a range as text, such as "between 0 and 1000" or "above 0 and at most 1"."""
    if limits.ge is not None and limits.le is not None:
        return f"between {_plain(limits.ge)} and {_plain(limits.le)}"
    low = f"above {_plain(limits.gt)}" if limits.gt is not None else f"at least {_plain(limits.ge)}"
    high = f"below {_plain(limits.lt)}" if limits.lt is not None else f"at most {_plain(limits.le)}"
    return f"{low} and {high}"


def _parts(value: Any, dotted: str) -> Iterator[tuple[str, Any]]:
    """Yield the dataclasses in a field's value, with their names."""
    items = enumerate(value) if isinstance(value, tuple) else ()
    for name, item in ((dotted, value), *((f"{dotted}.{number}", item) for number, item in items)):
        if dataclasses.is_dataclass(item):
            yield name, item


def _plain(limit: float | None) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:.15g}"

"""Tests that docs/settings.md is what the sections say, and that the sections say enough."""

import dataclasses
from typing import Any, get_args

import pytest

from protocol.errors import SettingsError
from protocol.paths import BASIC
from protocol.validation import check_range, range_of
from tests.docs.pages import program

PAGES = program("settings_pages")

SECTIONS = {dotted: kind for dotted, kind, _ in PAGES.sections()}


def test_the_reference_is_up_to_date() -> None:
    assert PAGES.SETTINGS.read_text() == PAGES.render_reference(), (
        "docs/settings.md does not match the sections: run `python docs/settings_pages.py`"
    )


def test_reference_has_forty_settings_that_people_set_first_and_the_rest_under_advanced() -> None:
    first = {
        f"{dotted}.{field.name}"
        for dotted, kind in SECTIONS.items()
        for field in dataclasses.fields(kind)
        if field.metadata == BASIC and not dotted.startswith(("eval.", "prompts."))
    }
    assert len(first) == 40
    section = PAGES.render_reference().partition("\n## [bound]\n")[2].partition("\n## [")[0]
    before, _, after = section.partition("Advanced:")
    assert "`max_staleness`" in before
    assert "`drop_share`" in after


@pytest.mark.parametrize("dotted", SECTIONS)
def test_every_setting_has_a_docstring(dotted: str) -> None:
    docs = PAGES.field_docs(SECTIONS[dotted])
    assert [field.name for field in dataclasses.fields(SECTIONS[dotted]) if not docs.get(field.name)] == []


@pytest.mark.parametrize("dotted", SECTIONS)
def test_every_number_has_a_range_that_is_closed_on_both_sides_and_holds_its_default(dotted: str) -> None:
    kind = SECTIONS[dotted]
    numbers = [field for field in dataclasses.fields(kind) if is_number(field.type)]
    assert {field.name for field in numbers} == set(ranges_of(kind))
    for field in numbers:
        limits = ranges_of(kind)[field.name]
        assert (limits.ge is None) != (limits.gt is None)
        assert (limits.le is None) != (limits.lt is None)
        if field.default is None:  # as another setting says
            continue
        assert limits.ge is None or limits.ge <= field.default
        assert limits.gt is None or limits.gt < field.default
        assert limits.le is None or limits.le >= field.default
        assert limits.lt is None or limits.lt > field.default


@pytest.mark.parametrize("dotted", SECTIONS)
def test_no_number_can_be_nan_infinite_or_outside_of_its_range(dotted: str) -> None:
    kind = SECTIONS[dotted]
    for name, limits in ranges_of(kind).items():
        low = limits.ge if limits.ge is not None else limits.gt
        high = limits.le if limits.le is not None else limits.lt
        assert low is not None
        assert high is not None
        outside = [float("nan"), float("inf"), -float("inf"), low - 1, high + max(1, abs(high))]
        for value in [*outside, *([limits.gt] if limits.gt is not None else [])]:
            with pytest.raises(SettingsError, match=f"^{name}: "):
                check_range(kind, name, value, name)


def ranges_of(kind: type) -> dict[str, Any]:
    ranges = {field.name: range_of(field.type) for field in dataclasses.fields(kind)}
    return {name: limits for name, limits in ranges.items() if limits is not None}


def is_number(hint: Any) -> bool:
    plain = getattr(hint, "__origin__", hint)
    return any(kind in (int, float) for kind in (plain, *get_args(plain)))

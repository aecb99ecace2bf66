"""Tests the check of a number against the range on its field."""

from dataclasses import dataclass
from typing import Annotated

import pytest
from msgspec import Meta

from protocol.errors import SettingsError
from protocol.ranges import check_range, check_ranges, describe_range, ranges_of


@dataclass(frozen=True)
class Inner:
    share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    name: str = "x"


@dataclass(frozen=True)
class Outer:
    count: Annotated[int, Meta(ge=1, le=10**6)] = 1
    decay: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    inner: Inner = Inner()
    more: tuple[Inner, ...] = ()
    none: Inner | None = None


def test_ranges_of_finds_the_fields_that_have_one() -> None:
    assert ranges_of(Outer) == {"count": Meta(ge=1, le=10**6), "decay": Meta(ge=0, lt=1)}
    assert ranges_of(Inner) == {"share": Meta(gt=0, le=1)}


@pytest.mark.parametrize("value", [1, 2, 10**6])
def test_check_range_accepts_what_is_inside(value: int) -> None:
    check_range(Outer, "count", value, "count")


@pytest.mark.parametrize("value", [0, 10**6 + 1, float("nan"), float("inf"), float("-inf")])
def test_check_range_refuses_what_is_outside(value: float) -> None:
    with pytest.raises(SettingsError, match=rf"^count: {value} is not between 1 and 1000000$"):
        check_range(Outer, "count", value, "count")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Outer(decay=1.0), "setting top.decay: 1.0 is not at least 0 and below 1"),
        (Outer(inner=Inner(share=0.0)), "setting top.inner.share: 0.0 is not above 0 and at most 1"),
        (Outer(more=(Inner(), Inner(share=2.0))), "setting top.more.1.share: 2.0 is not"),
        (Outer(none=Inner(share=float("nan"))), "setting top.none.share: nan is not"),
    ],
)
def test_check_ranges_reaches_every_dataclass_inside(config: Outer, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_ranges(config, "top")


def test_check_ranges_accepts_defaults() -> None:
    check_ranges(Outer(more=(Inner(),)), "")


def test_describe_range_writes_numbers_in_full() -> None:
    assert describe_range(Meta(ge=0.5, le=1e9)) == "between 0.5 and 1000000000"

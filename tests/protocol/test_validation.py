"""Tests how tables become dataclasses of settings, and what is said about a wrong one."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Interval, Predicate

from protocol.choices import NameIn
from protocol.errors import SettingsError
from protocol.validation import WrongSettings, check_range, describe_range, range_of, type_at, validated


@dataclass(frozen=True)
class Inner:
    share: Annotated[float, Interval(gt=0, le=1)] = 0.5
    name: Literal["x", "y"] = "x"

    def __post_init__(self) -> None:
        if self.share == 0.25:
            raise SettingsError("share 0.25 is not for inner")


@dataclass(frozen=True)
class Outer:
    count: Annotated[int, Interval(ge=1, le=10**6)] = 1
    decay: Annotated[float, Interval(ge=0, lt=1)] = 0.9
    free: float = 0.0
    text: str = ""
    algorithm: Annotated[str, Predicate(NameIn("trainer.algorithms.registry:ALGORITHMS"))] = "grpo"
    inner: Inner = field(default_factory=Inner)
    more: tuple[Inner, ...] = ()
    none: Inner | None = None
    maybe: int | None = None
    places: tuple[Annotated[int, Interval(ge=0)], ...] = ()


def problems(values: dict[str, Any], **arguments: str) -> Any:
    with pytest.raises(WrongSettings) as caught:
        validated(Outer, values, **arguments)
    assert str(caught.value) == "; ".join(caught.value.problems)
    return caught.value.problems


def test_range_of_is_the_interval_of_a_type() -> None:
    assert range_of(type_at(["count"], Outer)) == Interval(ge=1, le=10**6)
    assert range_of(type_at(["more", 1, "share"], Outer)) == Interval(gt=0, le=1)
    assert range_of(type_at(["places", 3], Outer)) == Interval(ge=0)
    assert range_of(type_at(["free"], Outer)) is None
    assert type_at(["free", "deep"], Outer) is None


@pytest.mark.parametrize("value", [1, 2, 10**6])
def test_check_range_accepts_what_is_inside(value: int) -> None:
    check_range(Outer, "count", value, "count")


@pytest.mark.parametrize("value", [0, 10**6 + 1, float("nan"), float("inf"), float("-inf")])
def test_check_range_refuses_what_is_outside(value: float) -> None:
    with pytest.raises(SettingsError, match=rf"^count: {value} is not between 1 and 1000000$"):
        check_range(Outer, "count", value, "count")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decay": 1.0}, "setting decay: 1.0 is not at least 0 and below 1"),
        ({"inner": {"share": 0.0}}, "setting inner.share: 0.0 is not above 0 and at most 1"),
        ({"more": [{}, {"share": 2.0}]}, "setting more.1.share: 2.0 is not above 0 and at most 1"),
        ({"none": {"share": float("nan")}}, "setting none.share: nan is not above 0 and at most 1"),
        ({"places": [0, -1]}, "setting places.1: -1 is not at least 0"),
        ({"free": float("inf")}, "setting free: Input should be a finite number (got inf)"),
        ({"inner": {"name": "xx"}}, "setting inner.name: 'xx' is not known; did you mean 'x'?"),
        ({"algorithm": "grop"}, "setting algorithm: 'grop' is not known; did you mean 'grpo'?"),
        ({"inner": {"shar": 1}}, "setting inner.shar is not known; did you mean 'share'?"),
        ({"inner": {"share": 0.25}}, "share 0.25 is not for inner"),
        ({"text": 3}, "setting text: Input should be a valid string (got 3)"),
        ({"count": True}, "setting count: expected a number (got true)"),
        ({"more": [{"share": False}]}, "setting more.0.share: expected a number (got false)"),
        ({"more": "x"}, "setting more: expected a list, in brackets (got 'x')"),
        ({"more": ["x"]}, "setting more.0: expected a table, such as { share = ... } (got 'x')"),
    ],
)
def test_validated_names_the_setting_its_value_and_the_remedy(values: dict[str, Any], message: str) -> None:
    assert problems(values) == [message]


def test_validated_reports_all_problems_at_once() -> None:
    assert len(problems({"count": 0, "decay": "much", "inner": {"nam": "x"}, "more": [{"share": 9}]})) == 4


def test_validated_names_each_true_or_false_that_belongs_elsewhere_once() -> None:
    assert problems({"text": True, "decay": False, "maybe": True, "places": [True], "algorithm": True}) == [
        "setting decay: expected a number (got false)",
        "setting maybe: expected a number (got true)",
        "setting places.0: expected a number (got true)",
        "setting text: Input should be a valid string (got True)",
        "setting algorithm: Input should be a valid string (got True)",
    ]


def test_validated_repeats_no_value_of_a_secret_field() -> None:
    assert problems({"text": 3}, secret="text") == ["setting text: Input should be a valid string"]


def test_validated_builds_inner_dataclasses() -> None:
    built = validated(Outer, {"more": [{}, {"share": 1}], "none": {"name": "y"}})
    assert built == Outer(more=(Inner(), Inner(share=1.0)), none=Inner(name="y"))


def test_describe_range_writes_numbers_in_full() -> None:
    assert describe_range(Interval(ge=0.5, le=1e9)) == "between 0.5 and 1000000000"

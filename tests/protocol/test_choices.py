"""A registry names its implementations, imports one when it is chosen, and knows their capabilities."""

import sys
from dataclasses import dataclass

import pytest

from protocol.choices import Entry, NameIn, Registry, load
from protocol.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Shape(Entry):
    round: bool = False


SHAPES = Registry({"circle": Shape("circle:Circle", round=True), "square": Shape("no_such_module:Square")})


def test_registry_finds_an_entry_without_importing_it() -> None:
    assert SHAPES.find("square", "shape").path == "no_such_module:Square"
    assert "no_such_module" not in sys.modules


def test_registry_suggests_the_nearest_name() -> None:
    with pytest.raises(SettingsError, match=r"^shape 'circel' is not known; did you mean 'circle'\?$"):
        SHAPES.find("circel", "shape")


def test_registry_lists_the_names_that_have_a_capability() -> None:
    assert SHAPES.having("round") == ("circle",)
    with pytest.raises(AttributeError):
        SHAPES.having("flat")


def test_name_in_takes_the_names_of_a_registry_and_where_they_may_be_names_of_ones_own() -> None:
    transports = NameIn("trainer.weights.registry:TRANSPORTS")
    assert transports("nccl")
    assert not transports("my_module:Mine")
    assert NameIn("trainer.algorithms.registry:ALGORITHMS")("my_module:Mine")


def test_load_returns_a_name_of_a_module_or_the_module() -> None:
    assert load("protocol.choices:Entry") is Entry
    assert load("protocol.choices") is sys.modules["protocol.choices"]
    with pytest.raises(ImportError):
        load("no_such_module:Square")

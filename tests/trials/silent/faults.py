"""Lists the faults of the benchmark: how each is put in, which check has to find it, and what it has to name.

A fault is put in from outside the product's code, by replacing a method of one object or a seam of `World`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.trials.silent.world import World


@dataclass(frozen=True, slots=True)
class Fault:
    """One silent fault."""

    name: str
    inject: Callable[[World], None]
    """Puts it in, before the step at which it begins."""
    found_by: frozenset[str]
    """Checks, any of which finds it."""
    where: Mapping[str, str] = field(default_factory=dict)
    """What the alarm has to name."""
    delay: int = 0
    """Steps after which it begins."""
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Settings without which the fault cannot be."""
    only_hf: bool = False
    """Whether it changes the model of transformers in the engine `hf`."""


FAULTS: list[Fault] = []
"""All faults, in the order of the table; the modules that define them add to it."""


def fault(
    name: str,
    *found_by: str,
    delay: int = 0,
    sections: Mapping[str, Any] | None = None,
    only_hf: bool = False,
    **where: str,
) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    """Enter a function that puts a fault in, and the checks that find it."""

    def enter(inject: Callable[[World], None]) -> Callable[[World], None]:
        FAULTS.append(Fault(name, inject, frozenset(found_by), where, delay, sections or {}, only_hf))
        return inject

    return enter

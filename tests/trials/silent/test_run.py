"""Tests that the audit finds seeded faults where they are, and raises no alarm about a run without one."""

import pytest

from tests.changes import slow_unless_changed
from tests.trials.silent.faults import FAULTS, Fault
from tests.trials.silent.run import clean, trial

CHANGES = slow_unless_changed("services/audit/", "tests/trials/silent/")
SOON = ("RoPE scaled on one engine", "reward to the neighbour", "training that changes nothing")
"""Faults that every run of the tests puts in: one of an engine, a verifier and the trainer."""


def cases() -> list[object]:
    """All faults; most run where the audit changed."""
    return [pytest.param(one, id=one.name, marks=() if one.name in SOON else CHANGES) for one in FAULTS]


@pytest.mark.parametrize("fault", cases())
async def test_fault_is_found_and_named(fault: Fault) -> None:
    row = await trial(fault)
    assert (row["found"], row["named"]) == (True, True), row


async def test_clean_run_has_no_alarm() -> None:
    assert await clean(0, 3) == []


@CHANGES
@pytest.mark.parametrize("seed", range(1, 4))
async def test_longer_clean_run_has_no_alarm(seed: int) -> None:
    assert await clean(seed, 20) == []


def test_benchmark_has_many_faults() -> None:
    assert len(FAULTS) >= 24
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)

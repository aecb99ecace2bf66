"""A real run under the faults of a seed. `make chaos SEED= MINUTES=` runs any other."""

import re
import subprocess
import sys

import pytest

from tests.changes import slow_unless_changed
from tests.integration.command import environment
from tests.integration.loop import ROOT
from tests.trials.chaos.schedule import KINDS, schedule


def chaos(seed: int, minutes: float, *words: str) -> None:
    """Run a seed and check its last line."""
    program = [
        sys.executable,
        "-m",
        "tests.trials.chaos.run",
        "--seed",
        str(seed),
        "--minutes",
        str(minutes),
        *words,
    ]
    finished = subprocess.run(
        program, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    said = finished.stdout + finished.stderr
    assert finished.returncode == 0, said
    last = finished.stdout.splitlines()[-1]
    assert last.endswith(" violations=0"), said
    injected = sum(int(count) for count in re.findall(r"[a-z]+:(\d+)", last))
    assert injected > 10 * minutes, said


@pytest.mark.timeout(1800)
@slow_unless_changed("services/", "protocol/", "tests/trials/chaos/")
def test_a_run_keeps_its_promises_under_half_a_minute_of_faults() -> None:
    chaos(1, 0.5, "--scripted", "--forked")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_keeps_its_promises_under_two_minutes_of_faults() -> None:
    chaos(1, 2)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_run_keeps_its_promises_under_ten_minutes_of_faults() -> None:
    chaos(2, 10)


def test_a_schedule_is_a_function_of_its_seed() -> None:
    assert schedule(7, 2) == schedule(7, 2)
    assert schedule(7, 2) != schedule(8, 2)
    assert schedule(7, 10)[: len(schedule(7, 2))] == schedule(7, 2)


def test_a_schedule_meets_every_target_and_mends_everything_in_time() -> None:
    faults = schedule(3, 10)
    met = {(fault.kind, fault.target) for fault in faults}
    assert met == {(kind, target) for kind, (targets, _) in KINDS.items() for target in targets}
    assert all(fault.at_s > 0 and fault.at_s + fault.lasts_s <= 600 for fault in faults)


def test_a_schedule_without_a_kind_keeps_the_moments_of_the_others() -> None:
    kinds = [kind for kind in KINDS if kind != "fill"]
    assert schedule(3, 10, kinds) == [fault for fault in schedule(3, 10) if fault.kind != "fill"]

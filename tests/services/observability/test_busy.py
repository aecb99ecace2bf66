"""The share of time in which an engine has work, on a clock that the test moves."""

import pytest

from services.observability.busy import BusyMeter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> BusyMeter:
    return BusyMeter(clock)


def test_an_idle_engine_is_not_busy(clock: Clock, meter: BusyMeter) -> None:
    clock.pass_s(10)
    assert meter.fraction() == 0


def test_work_counts_while_it_lasts(clock: Clock, meter: BusyMeter) -> None:
    clock.pass_s(1)
    with meter.working():
        clock.pass_s(3)
    clock.pass_s(6)
    assert meter.fraction() == pytest.approx(0.3)


def test_work_that_overlaps_counts_once(clock: Clock, meter: BusyMeter) -> None:
    with meter.working():
        clock.pass_s(2)
        with meter.working():
            clock.pass_s(2)
        clock.pass_s(1)
    clock.pass_s(5)
    assert meter.fraction() == pytest.approx(0.5)


def test_work_that_ends_in_another_order_than_it_began_counts_once(clock: Clock, meter: BusyMeter) -> None:
    first, second = meter.working(), meter.working()
    first.__enter__()
    clock.pass_s(1)
    second.__enter__()
    clock.pass_s(1)
    first.__exit__(None, None, None)
    clock.pass_s(1)
    second.__exit__(None, None, None)
    clock.pass_s(1)
    assert meter.fraction() == pytest.approx(0.75)


def test_every_call_begins_a_new_window(clock: Clock, meter: BusyMeter) -> None:
    with meter.working():
        clock.pass_s(4)
        assert meter.fraction() == 1
        clock.pass_s(1)
    clock.pass_s(3)
    assert meter.fraction() == pytest.approx(0.25)
    clock.pass_s(5)
    assert meter.fraction() == 0


def test_work_that_fails_ends(clock: Clock, meter: BusyMeter) -> None:
    def fail() -> None:
        with meter.working():
            clock.pass_s(1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    clock.pass_s(1)
    assert meter.fraction() == pytest.approx(0.5)


def test_no_time_at_all_is_not_busy(meter: BusyMeter) -> None:
    assert meter.fraction() == 0

"""Tests the share of time in which an engine has work, on a clock that the test moves."""

import pytest

from services.observability.busy import BusyMeter, BusyShare


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
    assert meter.seconds() == 0


def test_work_counts_while_it_lasts(clock: Clock, meter: BusyMeter) -> None:
    clock.pass_s(1)
    with meter.working():
        clock.pass_s(3)
    clock.pass_s(6)
    assert meter.seconds() == pytest.approx(3)


def test_work_that_overlaps_counts_once(clock: Clock, meter: BusyMeter) -> None:
    with meter.working():
        clock.pass_s(2)
        with meter.working():
            clock.pass_s(2)
        clock.pass_s(1)
    clock.pass_s(5)
    assert meter.seconds() == pytest.approx(5)


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
    assert meter.seconds() == pytest.approx(3)


def test_work_that_goes_on_counts_already(clock: Clock, meter: BusyMeter) -> None:
    with meter.working():
        clock.pass_s(4)
        assert meter.seconds() == 4


def test_work_that_fails_ends(clock: Clock, meter: BusyMeter) -> None:
    def fail() -> None:
        with meter.working():
            clock.pass_s(1)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    clock.pass_s(1)
    assert meter.seconds() == pytest.approx(1)


def test_the_share_is_the_mean_of_the_engines_since_the_last_look(clock: Clock) -> None:
    share = BusyShare(clock)
    assert share.since_last({"a": 0.0, "b": 0.0}) == 0
    clock.pass_s(10)
    assert share.since_last({"a": 5.0, "b": 10.0}) == pytest.approx(0.75)
    clock.pass_s(10)
    assert share.since_last({"a": 5.0, "c": 9.0}) == 0
    clock.pass_s(10)
    assert share.since_last({"a": 6.0, "c": 18.0}) == pytest.approx(0.5)


def test_no_time_and_no_engine_are_not_busy(clock: Clock) -> None:
    share = BusyShare(clock)
    assert share.since_last({}) == 0
    assert share.since_last({"a": 1.0}) == 0

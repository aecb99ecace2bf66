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


def test_a_sleeping_engine_is_not_busy_with_the_requests_that_it_keeps(
    clock: Clock, meter: BusyMeter
) -> None:
    with meter.working():
        clock.pass_s(2)
        meter.sleep()
        clock.pass_s(50)
        meter.wake()
        clock.pass_s(3)
    assert meter.seconds() == pytest.approx(5)


def test_a_reading_says_when_it_was_made(clock: Clock, meter: BusyMeter) -> None:
    with meter.working():
        clock.pass_s(4)
    assert meter.reading() == {"busy_s": 4.0, "busy_at_s": 104.0}


def read(at_s: float, busy_s: float) -> dict[str, float]:
    return {"busy_at_s": at_s, "busy_s": busy_s}


def test_the_share_is_the_mean_of_the_engines_between_their_own_readings() -> None:
    share = BusyShare()
    assert share.since_last({"a": read(0, 0), "b": read(1000, 0)}) is None
    assert share.since_last({"a": read(10, 5), "b": read(1010, 10)}) == pytest.approx(0.75)
    assert share.since_last({"a": read(30, 10), "c": read(5, 5)}) == pytest.approx(0.25)
    assert share.since_last({"a": read(40, 11), "c": read(15, 14)}) == pytest.approx(0.5)


def test_an_unchanged_reading_is_skipped_and_not_lost() -> None:
    """Three steps within one heartbeat of an engine that is always busy."""
    share = BusyShare()
    assert share.since_last({"a": read(0, 0)}) is None
    assert share.since_last({"a": read(0, 0)}) is None
    assert share.since_last({"a": read(5, 5), "b": read(0, 0)}) == 1
    assert share.since_last({"a": read(5, 5), "b": read(0, 0)}) is None
    assert share.since_last({"a": read(10, 10), "b": read(0, 0)}) == 1


def test_nothing_is_measured_without_engines_or_of_older_ones() -> None:
    share = BusyShare()
    assert share.since_last({}) is None
    for busy_s in (1.0, 2.0):
        assert share.since_last({"a": {"busy_s": busy_s}, "b": {}}) is None

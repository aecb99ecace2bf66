"""Shares of each process's time, from heartbeats on a clock that the test moves."""

from typing import Any

import pytest

from services.ledger.interface import Peer
from services.monitor.run_state import WINDOW_S, Activity


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def peer(role: str, **info: Any) -> Peer:
    return Peer(role, f"{role}.1", info)


def test_busy_time_is_measured_and_the_rest_waits() -> None:
    clock = Clock()
    activity = Activity(clock)
    for second in range(21):
        clock.now = float(second)
        activity.observe([peer("rollout", busy_s=0.75 * second, waits={"a lease: bound": 1.0})])
    shares = activity.shares("rollout.1")
    assert shares["working"] == pytest.approx(0.75)
    assert shares["waits"] == {"waits for the trainer's next step (staleness bound)": pytest.approx(0.25)}
    assert shares["window_s"] == 20


def test_trainer_works_when_it_does_not_wait() -> None:
    clock = Clock()
    activity = Activity(clock)
    for second in range(20):
        clock.now = float(second)
        activity.observe([peer("trainer", waits={f"groups: {second} of 8": 1.0} if second % 4 == 0 else {})])
    shares = activity.shares("trainer.1")
    assert shares["working"] == pytest.approx(0.75)
    assert shares["waits"] == {"waits for rollouts and rewards": pytest.approx(0.25)}


def test_work_of_others_is_not_known() -> None:
    activity = Activity(Clock())
    activity.observe([peer("reward", waits={})])
    assert activity.shares("reward.1")["working"] is None
    assert activity.shares("nobody.1") == {"working": None, "waits": {}, "window_s": 0.0}


def test_activity_that_ended_long_ago_does_not_count() -> None:
    clock = Clock()
    activity = Activity(clock)
    for second in range(int(3 * WINDOW_S)):
        clock.now = float(second)
        waits = {"groups": 1.0} if second < WINDOW_S else {}
        activity.observe([peer("trainer", waits=waits)])
    assert activity.shares("trainer.1")["waits"] == {}
    activity.observe([])
    assert activity.shares("trainer.1")["window_s"] == 0.0

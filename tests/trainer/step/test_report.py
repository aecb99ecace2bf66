"""Tests the times of a step's parts."""

import pytest

from trainer.step.report import StepClock


def test_parts_and_the_rest_are_the_time_between_two_laps() -> None:
    times = iter([0.0, 1.0, 1.5, 2.5, 3.0, 3.5, 7.5, 8.0, 9.0, 10.0, 20.0, 21.0, 22.0])
    clock = StepClock(lambda: next(times))
    with clock.part("wait"), clock.part("drafts"):  # 1 to 3, and 1.5 to 2.5 of it
        pass
    with pytest.raises(ValueError, match="x"), clock.part("train"):  # 3.5 to 7.5, also if it fails
        raise ValueError("x")
    with clock.part("wait"):  # 8 to 9
        pass
    first = clock.lap()
    assert first == {
        "step_s": 10.0, "wait_s": 3.0, "train_s": 4.0, "publish_s": 0.0, "checkpoint_s": 0.0, "other_s": 3.0,
        "drafts_s": 1.0,
    }  # fmt: skip
    with clock.part("checkpoint"):  # 20 to 21
        pass
    second = clock.lap()
    assert second == {
        "step_s": 12.0, "wait_s": 0.0, "train_s": 0.0, "publish_s": 0.0, "checkpoint_s": 1.0, "other_s": 11.0,
    }  # fmt: skip

"""Tests which part of a run is named as the one that the others wait for, and what to change."""

from typing import Any

import pytest

from services.observability.bottleneck import PartTimes


def lines(count: int = 5, **fields: Any) -> list[dict[str, Any]]:
    """Steps of 10 s in which the trainer works for 1 s, unless fields say otherwise."""
    parts = {"step_s": 10.0, "wait_s": 9.0, "train_s": 0.5, "publish_s": 0.25, "checkpoint_s": 0.25}
    return [{"epoch": "e1", "step": step, **parts, "other_s": 0.0, **fields} for step in range(count)]


@pytest.mark.parametrize(
    ("fields", "named", "remedy"),
    [
        ({"engine_busy": 0.12, "reward_busy": 0.98}, "rewards (busy 98%; trainer 10%, engines 12%)", "more"),
        ({"engine_busy": 0.9, "reward_busy": 1.0}, "engines (busy 90%; trainer 10%, rewards 100%)", "more"),
        ({"engine_busy": 0.99, "train_s": 8.0}, "engines (busy 99%; trainer 85%)", "more engines"),
        ({"engine_busy": 0.3, "train_s": 9.0}, "trainer (busy 95%; engines 30%)", "micro_batch_tokens"),
        ({"train_s": 0.0, "publish_s": 9.0}, "trainer (busy 92%)", "weights"),
        ({"train_s": 0.0, "checkpoint_s": 9.0}, "trainer (busy 92%)", "trainer.checkpoint_every"),
        ({"other_s": 9.0}, "trainer (busy 100%)", "ledger"),
        ({"engine_busy": 0.5, "reward_busy": 0}, "none (trainer 10%, engines 50%, rewards 0%)", "overlap"),
    ],
)  # fmt: skip
def test_the_busy_part_is_named_with_all_shares_and_its_remedy(
    fields: dict[str, Any], named: str, remedy: str
) -> None:
    sentence = PartTimes(lines(**fields)).bottleneck()
    assert sentence.startswith(f"bottleneck: {named}: ")
    assert remedy in sentence


def test_nothing_is_said_where_too_little_was_measured() -> None:
    assert PartTimes(lines(3, engine_busy=1.0)).bottleneck() == ""
    assert PartTimes(lines()).bottleneck() == ""
    assert PartTimes(lines(engine_busy=None, step_s=None)).bottleneck() == ""


def test_the_first_step_of_each_trainer_does_not_count() -> None:
    late = {**lines(1)[0], "epoch": "e2", "step_s": 1e6, "wait_s": 0.0, "other_s": 1e6, "engine_busy": 0.0}
    times = PartTimes([*lines(engine_busy=1.0), late])
    assert times.shares() == {"trainer": pytest.approx(0.1), "engines": pytest.approx(1.0)}


def test_shares_are_over_the_steps_that_measured_them() -> None:
    times = PartTimes([*lines(3, engine_busy=0.2), *lines(2), *lines(2, engine_busy=0.8)])
    assert times.shares()["engines"] == pytest.approx((2 * 0.2 + 2 * 0.8) / 4)

"""Tests that a step is planned as its command says."""

from tests.trainer.ranks.step_ranks import ALGORITHM, command
from trainer.step.train_command import plan_command


def test_a_command_is_planned_with_all_that_it_says() -> None:
    plan = plan_command(command(2), ALGORITHM)
    assert (plan.step, plan.temperature, plan.decoupled, len(plan.samples)) == (2, 0.5, True, 2)
    assert plan.trained_counts == {2: {2: 2}}
    assert plan.measured.tolist() == [True, True]

"""Tests which process of the trainer is a rank of which model."""

import pytest

from trainer.ranks.process_group import RankAssignment, rank_assignment


def test_the_policy_has_the_first_processes_and_other_models_the_next() -> None:
    remote_ranks = {"reference": 1, "teacher": 2}
    assert [rank_assignment(process, 2, remote_ranks) for process in range(5)] == [
        RankAssignment("", 0, 2), RankAssignment("", 1, 2), RankAssignment("reference", 0, 1),
        RankAssignment("teacher", 0, 2), RankAssignment("teacher", 1, 2),
    ]  # fmt: skip


def test_a_process_too_many_has_no_seat() -> None:
    with pytest.raises(ValueError, match="process 3: the trainer has 3"):
        rank_assignment(3, 2, {"teacher": 1})

"""Tests which process of the trainer is a rank of which model."""

import pytest

from trainer.ranks.process_group import Seat, seat_of


def test_the_policy_has_the_first_processes_and_other_models_the_next() -> None:
    apart = {"reference": 1, "teacher": 2}
    assert [seat_of(process, 2, apart) for process in range(5)] == [
        Seat("", 0, 2), Seat("", 1, 2), Seat("reference", 0, 1), Seat("teacher", 0, 2), Seat("teacher", 1, 2),
    ]  # fmt: skip


def test_a_process_too_many_has_no_seat() -> None:
    with pytest.raises(ValueError, match="process 3: the trainer has 3"):
        seat_of(3, 2, {"teacher": 1})

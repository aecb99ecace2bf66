"""Tests in which order numbers go between a model with ranks of its own and the policy's replicas."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.roles.remote import StepDivision


@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=8), data=st.data())
def test_each_replica_gets_the_numbers_of_its_rows_there_and_back(
    lengths: list[int], data: st.DataObject
) -> None:
    def divided(replicas: int) -> list[list[int]]:
        owners = [data.draw(st.integers(0, replicas - 1)) for _ in lengths]
        return [[row for row, owner in enumerate(owners) if owner == replica] for replica in range(replicas)]

    division = StepDivision(lengths, divided(2), divided(3))
    numbers = [torch.arange(length) + 100.0 * row for row, length in enumerate(lengths)]

    def of(rows: list[int]) -> torch.Tensor:
        return torch.cat([torch.zeros(0), *(numbers[row] for row in rows)])

    sent = [of(rows) for rows in division.remote_rows]
    assert [len(values) for values in sent] == [division.entries(replica) for replica in range(3)]
    whole = division.to_policy(sent)
    assert torch.equal(whole, torch.cat([of(rows) for rows in division.policy_rows]))
    back = division.to_remote(whole)
    assert [values.tolist() for values in back] == [values.tolist() for values in sent]

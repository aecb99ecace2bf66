"""Tests which records of a step an audit decodes, and what it finds in them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from protocol.codec import encode_payload
from protocol.errors import ProtocolError
from protocol.rollout_view import decode_rollout
from services.audit.records import Expectations, TrainedGroup, check_group
from tests.trainer.groups import GroupSpec, SampleSpec, scored
from trainer.algorithms import make_algorithm
from trainer.step.plan import plan_step


def test_records_of_chosen_groups_alone_are_decoded_with_bound_and_rows() -> None:
    pair = [SampleSpec([5, 6], [0, 0], reward=1.0), SampleSpec([7], [0])]
    record = encode_payload(scored(GroupSpec(group=8, samples=pair)))
    places = [(3, 0), (8, 1), (8, 1), (9, 2)]
    plan = SimpleNamespace(samples=[SimpleNamespace(group=group, row=row) for group, row in places])
    command = SimpleNamespace(records=[b"no record", record, b"no record"], bounds=[1, 2, 3])
    [found] = TrainedGroup.select(plan, command, lambda group: group == 8)  # type: ignore[arg-type]
    assert (found.view.group, found.bound, found.rows) == (8, 2, (1, 2))
    assert [row.tokens.tolist() for row in found.view.rows] == [[5, 6], [7]]
    with pytest.raises(ProtocolError):
        TrainedGroup.select(plan, command, lambda group: group == 3)  # type: ignore[arg-type]


def test_weights_are_checked_beside_a_sample_without_a_sampled_token() -> None:
    pair = [SampleSpec([5, 6], [0, 0], reward=1.0), SampleSpec([7], [0], mask=[0])]
    group, expected = scored(GroupSpec(samples=pair)), Expectations(whole_turns=False)
    plan = plan_step([(group, 1)], step=0, algorithm=make_algorithm(expected.algorithm))
    trained = TrainedGroup(group, decode_rollout(group.rollout), 1, plan, (0, 1))
    assert list(check_group(trained, expected)) == []
    doubled = replace(trained, plan=replace(plan, weights=plan.weights * 2))
    assert [finding.check for finding in check_group(doubled, expected)] == ["weight", "weight"]

"""Tests which records of a step an audit decodes."""

from types import SimpleNamespace

import pytest

from protocol.codec import encode_payload
from protocol.errors import ProtocolError
from services.audit.records import TrainedGroup
from tests.trainer.groups import GroupSpec, SampleSpec, scored


def test_records_of_chosen_groups_alone_are_decoded_with_bound_and_rows() -> None:
    pair = [SampleSpec([5, 6], [0, 0], reward=1.0), SampleSpec([7], [0])]
    record = encode_payload(scored(GroupSpec(group=8, samples=pair)))
    places = [(3, 0), (8, 1), (8, 1), (9, 2)]
    plan = SimpleNamespace(samples=[SimpleNamespace(group=group, row=row) for group, row in places])
    command = SimpleNamespace(records=[b"no record", record, b"no record"], bounds=[1, 2, 3])
    [found] = TrainedGroup.chosen(plan, command, lambda group: group == 8)  # type: ignore[arg-type]
    assert (found.view.group, found.bound, found.rows) == (8, 2, (1, 2))
    assert [row.tokens.tolist() for row in found.view.rows] == [[5, 6], [7]]
    with pytest.raises(ProtocolError):
        TrainedGroup.chosen(plan, command, lambda group: group == 3)  # type: ignore[arg-type]

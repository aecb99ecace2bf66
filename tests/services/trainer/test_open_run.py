"""Tests what a trainer reads of groups that were dropped, and of those that it cannot train."""

from pathlib import Path

import pytest

from protocol.codec import encode_payload
from protocol.errors import ProtocolError
from services.ledger.interface import Taken, TakenGroup
from services.trainer.open_run import OpenRun
from tests.trainer.groups import GroupSpec, SampleSpec, scored
from trainer.storage.spool import Spool


def open_run(spool: Spool) -> OpenRun:
    return OpenRun(
        process=None, epoch="e1", spool=spool, archive=None, checkpoints=None, steps=None, broadcaster=None
    )  # type: ignore[arg-type]


def test_lengths_are_of_the_groups_that_had_been_scored(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    samples = [SampleSpec([5, 6, 7], [0, 0, 0]), SampleSpec([5], [0])]
    spool.put_many([(4, "t", encode_payload(scored(GroupSpec(group=4, samples=samples))))])
    assert open_run(spool).response_lengths([3, 4]) == [[3, 1]]


def test_a_record_that_cannot_be_read_does_not_end_the_run(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    spool.put_many([(4, "t", b"noise")])
    assert open_run(spool).response_lengths([4]) == []


def taken(*groups: int) -> Taken:
    return Taken(0, tuple(TakenGroup(group, "t", 1, 1, 0, {0: 2}) for group in groups))


def test_only_the_groups_that_refuse_a_batch_are_given_up(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    wrong = SampleSpec([5, 6], [0, 0], logprobs=[-1.0, 2.64])
    groups = [GroupSpec(group=3), GroupSpec(group=4, samples=[wrong]), GroupSpec(group=6)]
    spool.put_many(
        [(spec.group, "t", encode_payload(scored(spec))) for spec in groups] + [(5, "t", b"noise")]
    )
    refused = ProtocolError("group 4: logprobs")
    causes = open_run(spool).unreadable(taken(3, 4, 5, 6), refused).causes
    assert list(causes) == [(4, "t"), (5, "t")]
    assert causes[4, "t"] == "group 4: logprobs of sample 0 has 2.64 for token 1, above 0"
    assert causes[5, "t"].startswith("group 5: not a message")
    with pytest.raises(ProtocolError, match="group 4: logprobs"):
        open_run(spool).unreadable(taken(3, 6), refused)

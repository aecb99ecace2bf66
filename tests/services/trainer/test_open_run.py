"""Tests what a trainer reads of groups that were dropped."""

from pathlib import Path

from protocol.codec import encode_payload
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

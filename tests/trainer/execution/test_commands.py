"""Tests that the other ranks can read every command of rank 0."""

from typing import get_args

import msgspec
import pytest

from trainer.batch import StepTotals
from trainer.execution.commands import AnyCommand, PublishCommand, RankCommand, SaveCommand, StepCommand
from trainer.step.train_command import UpdateSchedule

SCHEDULE = UpdateSchedule(True, (0, 1), (StepTotals(4, 2, 1, True), StepTotals(2, 1, 0, False)), True)
COMMANDS = (StepCommand(SCHEDULE), SaveCommand("d"), PublishCommand("e", 1, "float32"))


def test_the_list_has_every_command() -> None:
    assert set(get_args(AnyCommand)) == set(RankCommand.__subclasses__())


@pytest.mark.parametrize(
    "command", [StepCommand(SCHEDULE), SaveCommand("d"), PublishCommand("e", 1, "float32")]
)
def test_a_command_arrives_as_it_was_sent(command: AnyCommand) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=AnyCommand) == command

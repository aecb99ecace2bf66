"""Tests a step on one rank: what the backend is given, what is reported, and refusals."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from protocol.codec import encode_payload
from protocol.errors import BoundViolation, ProtocolError, TetherError
from protocol.messages import Action, Control
from tests.trainer.backends.step_ranks import ALGORITHM, WritingBackend, command
from tests.trainer.commands import train_command
from tests.trainer.groups import GroupSpec, SampleSpec, scored, whole
from trainer.backends.rank_commands import TrainCommand
from trainer.backends.scripted import ScriptedBackend
from trainer.backends.step import plan_command, run_step_on_all_ranks
from trainer.config import TrainerConfig
from trainer.roles.models import RankModels


def test_one_rank_steps_on_everything(tmp_path: Path) -> None:
    backend = WritingBackend(tmp_path, 0, 2)
    backend.replicas = ((0,),)
    plan, stats = run_step_on_all_ranks(RankModels(backend), ALGORITHM, command(1))
    assert (stats.trained_tokens, stats.imbalance) == (plan.stats.trained_tokens, 0.0) == (4, 0.0)
    found = torch.load(tmp_path / "1.0.pt", weights_only=True)
    assert torch.equal(found["tokens"], whole(plan).tokens)
    assert found["decoupled"]
    assert found["reference_logprobs"] is not None
    assert found["start_logprobs"] is None


def train(records: Sequence[bytes], bound: int = 0) -> TrainCommand:
    return train_command(1, records, bound=bound, mask_late=False)


LATE = encode_payload(scored(GroupSpec(samples=[SampleSpec([5], [0])])))


@pytest.mark.parametrize(
    ("made", "kind", "said"),
    [
        (
            train([LATE]),
            BoundViolation,
            "group 0: token 0 of version 0 has lag 1 in step 1, over",
        ),
        (train([LATE, LATE], bound=1), ProtocolError, "group 0: comes twice"),
        (train([encode_payload(Control(action=Action.ABORT))]), ProtocolError, "spool record is a Control"),
        (train([b"\x00"]), ProtocolError, "not a message"),
    ],
)
def test_step_that_cannot_be_planned_changes_nothing(
    made: TrainCommand, kind: type[TetherError], said: str
) -> None:
    backend = ScriptedBackend(trainer=TrainerConfig(backend="scripted"))
    ((_, before),) = [(name, tensor.clone()) for name, tensor in backend.export()]
    with pytest.raises(kind, match=said):
        run_step_on_all_ranks(RankModels(backend), ALGORITHM, made)
    ((_, after),) = backend.export()
    assert torch.equal(before, after)


def test_a_command_is_planned_with_all_that_it_says() -> None:
    plan = plan_command(command(2), ALGORITHM)
    assert (plan.step, plan.temperature, plan.decoupled, len(plan.samples)) == (2, 0.5, True, 2)
    assert plan.trained_counts == {2: {2: 2}}
    assert plan.measured.tolist() == [True, True]

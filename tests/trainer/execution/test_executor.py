"""Tests commands on one rank: the batch of a step, its statistics, refusals, and a checkpoint."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from protocol.codec import encode_payload
from protocol.errors import BoundViolation, ProtocolError, TetherError
from protocol.messages import Action, Control
from tests.trainer.commands import train_command
from tests.trainer.groups import GroupSpec, SampleSpec, scored, whole
from tests.trainer.ranks.step_ranks import WritingBackend, command
from trainer.backends.scripted import ScriptedBackend
from trainer.config import TrainerConfig
from trainer.execution.commands import CopyWeightsCommand, FinishSaveCommand, RestoreCommand, SaveCommand
from trainer.execution.executor import Executor
from trainer.roles.models import RankModels
from trainer.step.train_command import TrainCommand


def test_one_rank_steps_on_everything(tmp_path: Path) -> None:
    backend = WritingBackend(tmp_path, 0, 2)
    backend.replicas = ((0,),)
    plan, stats = Executor(RankModels(backend)).train(command(1))
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
        (train([LATE, LATE], bound=1), ProtocolError, "group 0: appears twice"),
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
        Executor(RankModels(backend)).train(made)
    ((_, after),) = backend.export()
    assert torch.equal(before, after)


def weights(executor: Executor) -> list[float]:
    (copy,) = executor.lead(CopyWeightsCommand("float32")).values()
    return copy.tolist()


def test_a_checkpoint_is_made_and_restored_by_commands(tmp_path: Path) -> None:
    executor = Executor(RankModels(ScriptedBackend(trainer=TrainerConfig())))
    before = weights(executor)
    executor.lead(SaveCommand(str(tmp_path)))
    executor.train(command(1))
    assert executor.lead(FinishSaveCommand()) == {}
    assert weights(executor) != before
    executor.lead(RestoreCommand(str(tmp_path)))
    assert weights(executor) == before
    executor.close()


def test_a_profiled_step_leaves_a_trace_of_its_updates(tmp_path: Path) -> None:
    backend = WritingBackend(tmp_path, 0, 2)
    backend.replicas = ((0,),)
    executor = Executor(RankModels(backend))
    file = tmp_path / "profiles" / "step_00000001"
    executor.train(msgspec.structs.replace(command(1), profile=str(file)))
    (written,) = file.parent.iterdir()
    assert written.name == "step_00000001.rank_00000.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(written.read_bytes()))["traceEvents"]}
    assert any(str(name).startswith("aten::") for name in names)

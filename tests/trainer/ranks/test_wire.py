"""Tests that every rank steps on the part of its replica, sent by rank 0 between real processes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.trainer.megatron.launch import launch
from tests.trainer.ranks.step_ranks import ALGORITHM, REPLICAS, command
from trainer.data.packing import balance
from trainer.step.train_command import plan_command


def steps(directory: Path, ranks: int) -> None:
    """Make every step on so many ranks, and compare what each was given with the part of its replica."""
    module = "tests.trainer.ranks.step_ranks"
    launch(ranks, module, str(directory), logs=directory / "logs", deadline_s=300)
    for step, replicas in enumerate(REPLICAS[ranks]):
        plan = plan_command(command(step), ALGORITHM)
        for ranks, piece in zip(replicas, balance(plan.lengths.tolist(), len(replicas)), strict=True):
            part = plan.part(piece)
            wanted = replace(part, reference_logprobs=torch.zeros(len(part.tokens)))
            for rank in ranks:
                found = torch.load(directory / f"{step}.{rank}.pt", weights_only=True)
                assert found.pop("totals") == repr(plan.totals)
                for name, value in found.items():
                    other = getattr(wanted, name)
                    same = torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
                    assert same, (step, rank, name)


@pytest.mark.xdist_group("layouts")  # one process forks the ranks of all
def test_every_rank_is_given_the_part_of_its_replica(tmp_path: Path) -> None:
    steps(tmp_path, 3)
    # samples of 5 and 2 inputs, on two replicas and on three
    assert (tmp_path / "imbalance").read_text() == repr([5 * 2 / 7 - 1, 5 * 2 / 7 - 1, 5 * 3 / 7 - 1])
    for rank in (1, 2):  # and by the store, where ranks on GPUs wait for commands, all comes to each
        assert (tmp_path / f"queued.{rank}").read_text().startswith("True, then wait timeout")


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_ranks_on_gpus_are_given_their_parts_by_nccl(tmp_path: Path) -> None:
    steps(tmp_path, 2)
    assert (tmp_path / "exchange").read_text() == "nccl"
    assert (tmp_path / "imbalance").read_text() == repr([0.0, 0.0, 5 * 2 / 7 - 1])

"""Runs one rank of steps with several replicas; each rank writes down the part that it was given.

The ranks exchange over NCCL where each has a GPU, else over gloo."""

import os
import sys
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from protocol.codec import encode_payload
from tests.trainer.commands import train_command
from tests.trainer.groups import GroupSpec, SampleSpec, routed
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.backends.base import StepStats
from trainer.backends.scripted import ScriptedBackend
from trainer.batch import Batch
from trainer.config import TrainerConfig
from trainer.execution.commands import ExitCommand
from trainer.execution.executor import Executor
from trainer.ranks.collectives import next_queued, queue_for_others
from trainer.roles.models import RankModels
from trainer.step.train_command import TrainCommand

ALGORITHM = make_algorithm(AlgorithmConfig())
REPLICAS = {
    2: (((0, 1),), ((1, 0),), ((0,), (1,))),
    3: (((0, 2), (1,)), ((2, 0), (1,)), ((0,), (1,), (2,))),
}
"""Number of ranks -> the replicas of each step, which a real backend never changes; rank 0 is in the first
one."""
MESSAGES = (b"first", b"\0\xff\0", b"x" * 100_000)


def command(step: int) -> TrainCommand:
    """Two samples with recorded experts, so that the last step has a replica without one."""
    samples = [SampleSpec([5, 6, 7, 8], [0, 0, step, step], 1.0, mask=[1, 1, 0, 1]), SampleSpec([9], [step])]
    records = [encode_payload(routed(GroupSpec(group=step, samples=samples), layers=2))]
    return train_command(step, records, temperature=0.5, recompute_logprobs=True, reference_logprobs=True)


class WritingBackend(ScriptedBackend):
    """Writes every batch to a file."""

    def __init__(self, directory: Path, rank: int, ranks: int) -> None:
        super().__init__(trainer=TrainerConfig(backend="scripted"))
        self._directory, self._rank = directory, rank
        self.replicas = REPLICAS[ranks][0]

    def train_step(self, batch: Batch) -> StepStats:
        found = {field.name: getattr(batch, field.name) for field in fields(batch)}
        found["totals"] = repr(batch.totals)
        torch.save(found, self._directory / f"{batch.step}.{self._rank}.pt")
        return super().train_step(batch)


def exchange_by_store(directory: Path, rank: int) -> None:
    """Queue messages as rank 0; on the others, write down what came of them, and of the wait for another."""
    if rank == 0:
        for message in MESSAGES:
            queue_for_others(message)
    else:
        came = [next_queued() for _ in MESSAGES] == list(MESSAGES)
        store = dist.distributed_c10d._get_default_store()
        patience = store.timeout
        store.set_timeout(timedelta(seconds=0.2))
        try:
            next_queued()
        except RuntimeError as error:
            (directory / f"queued.{rank}").write_text(f"{came}, then {error}")
        store.set_timeout(patience)
    dist.barrier()


def run(directory: Path) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if on_gpus := torch.cuda.device_count() >= ranks:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=timedelta(seconds=300))
    exchange_by_store(directory, rank)
    backend = WritingBackend(directory, rank, ranks)
    if rank:
        Executor(RankModels(backend)).follow()
    else:
        leader, imbalance = Executor(RankModels(backend, algorithm=ALGORITHM)), []
        for step, replicas in enumerate(REPLICAS[ranks]):
            backend.replicas = replicas
            imbalance.append(leader.train(command(step))[1].imbalance)
        leader.lead(ExitCommand())
        (directory / "imbalance").write_text(repr(imbalance))
        (directory / "exchange").write_text(dist.get_backend())
    dist.destroy_process_group()


if __name__ == "__main__":
    run(Path(sys.argv[1]))

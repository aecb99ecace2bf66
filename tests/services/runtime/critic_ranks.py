"""Runs a process of a trainer whose critic may have ranks of its own: restores, makes steps, saves.

As a module: CASE, as JSON.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from services.runtime.training import build_follower, build_models
from services.settings.sections import ModelConfig, Settings
from tests.trainer.megatron.roles.critic_ranks import measured
from tests.trainer.roles.ppo_steps import ALGORITHM, CRITIC, OPTIMIZER, command
from trainer.config import ParallelConfig, TrainerConfig
from trainer.execution.commands import (
    ExitCommand,
    FinishSaveCommand,
    IdleCommand,
    RestoreCommand,
    SaveCommand,
)
from trainer.execution.executor import Executor
from trainer.roles.config import CriticConfig, PlacementConfig


class Case(msgspec.Struct, frozen=True):
    """Steps of PPO between two checkpoints."""

    backend: str
    model: str
    steps: tuple[int, ...]
    out: str
    """Directory of the checkpoint after the steps, and of what was measured."""
    restore: str = ""
    """Checkpoint to begin with."""
    parallel: ParallelConfig = ParallelConfig()
    placement: PlacementConfig = PlacementConfig()
    critic: CriticConfig = CRITIC
    epochs: int = 1
    mini_batches: int = 1

    @property
    def settings(self) -> Settings:
        trainer = TrainerConfig(
            backend=self.backend, device="cpu", dtype="float32", micro_batch_tokens=24, micro_batch_size=3
        )
        return dataclasses.replace(
            Settings(),
            model=ModelConfig(path=self.model),
            trainer=trainer,
            parallel=self.parallel,
            placement=self.placement,
            optimizer=OPTIMIZER,
            algorithm=ALGORITHM,
            critic=self.critic,
        )


def lead(case: Case, executor: Executor) -> None:
    """Do on rank 0 what a case says."""
    out, found = Path(case.out), []
    if case.restore:
        executor.lead(RestoreCommand(case.restore))
    for step in case.steps:
        asked = msgspec.structs.replace(command(step), epochs=case.epochs, mini_batches=case.mini_batches)
        found.append(measured(executor.train(asked)[1]))
        executor.lead(IdleCommand())
    out.mkdir()
    executor.lead(SaveCommand(case.out))
    assert executor.lead(FinishSaveCommand()) == {}
    (out / "measured.json").write_text(json.dumps(found))
    executor.lead(ExitCommand())


def measured_of(case: Case) -> list[dict[str, Any]]:
    """What each step of a case measured, when it has run."""
    found: list[dict[str, Any]] = json.loads((Path(case.out) / "measured.json").read_text())
    return found


def run(case: Case, process: int) -> None:
    if follower := build_follower(case.settings, process):
        follower.follow()
        return
    executor = Executor(build_models(case.settings))
    if process:
        executor.follow()
    else:
        lead(case, executor)
    executor.close()


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=Case), int(os.environ["RANK"]))

"""Runs a process of a trainer whose models may have ranks of their own; rank 0 writes what it measured."""

import dataclasses
import os
import sys
from pathlib import Path

import msgspec
import torch

from services.runtime.training import build_follower, build_models
from services.settings.sections import ModelConfig, Settings
from tests.trainer.roles.ppo_steps import command
from trainer.backends.base import StepStats
from trainer.config import AlgorithmConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.execution.commands import CopyWeightsCommand, ExitCommand, IdleCommand, KeepReferenceCommand
from trainer.execution.executor import Executor
from trainer.roles.config import PlacementConfig, RewardModelConfig, TeacherConfig

STEPS = (2, 3)
OPTIMIZER = OptimizerConfig(lr=1e-2, clip_grad=0.5, adam_eps=1e-3)
ALGORITHM = AlgorithmConfig(name="on_policy_distillation", kl_coef=0.3, opd_reward_coef=0.5)


class Case(msgspec.Struct, frozen=True):
    """Models and their ranks."""

    backend: str
    model: str
    teacher: str
    reward_model: str
    parallel: ParallelConfig = ParallelConfig()
    placement: PlacementConfig = PlacementConfig()

    @property
    def settings(self) -> Settings:
        trainer = TrainerConfig(
            backend=self.backend, device="cpu", dtype="float32", micro_batch_tokens=24, micro_batch_size=3
        )
        return dataclasses.replace(
            Settings(),
            model=ModelConfig(path=self.model),
            teacher=TeacherConfig(path=self.teacher),
            reward_model=RewardModelConfig(path=self.reward_model, weight=0.5),
            trainer=trainer,
            parallel=self.parallel,
            placement=self.placement,
            optimizer=OPTIMIZER,
            algorithm=ALGORITHM,
        )


def make_steps(executor: Executor) -> tuple[list[StepStats], dict[str, torch.Tensor]]:
    """Make the steps from rank 0; returns what was measured, and the weights after them."""
    executor.lead(KeepReferenceCommand())
    stats = []
    for step in STEPS:
        asked = msgspec.structs.replace(command(step), reference_logprobs=True)
        stats.append(executor.train(asked)[1])
        executor.lead(IdleCommand())
    weights = {name: tensor.clone() for name, tensor in executor.lead(CopyWeightsCommand("float32")).items()}
    executor.lead(ExitCommand())
    return stats, weights


def measured(stats: list[StepStats]) -> list[tuple[float | None, ...]]:
    """Return what each step has of each model."""
    names = "loss", "grad_norm", "reference_kl_k3", "teacher_kl_k1", "reward_model_mean"
    return [tuple(getattr(found, name) for name in names) for found in stats]


def run(case: Case, results: Path) -> None:
    process = int(os.environ["RANK"])
    if follower := build_follower(case.settings, process):
        follower.follow()
        return
    executor = Executor(build_models(case.settings))
    if process:
        executor.follow()
        return
    stats, weights = make_steps(executor)
    torch.save({"measured": measured(stats), "weights": weights}, results)


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=Case), Path(sys.argv[2]))

"""Runs steps of PPO in one layout, a rank each; rank 0 writes down the results.

As a module: LAYOUT MODEL_DIR OUT [CHECKPOINT], a checkpoint of another layout, to be saved again in this one.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.trainer.megatron.layouts import LAYOUTS
from tests.trainer.megatron.roles.critic_weights import critic_export
from tests.trainer.roles.ppo_steps import STEPS, command, make_models
from trainer.backends.base import StepStats
from trainer.execution.commands import (
    ExitCommand,
    FinishSaveCommand,
    OffloadCommand,
    OnloadCommand,
    RestoreCommand,
    SaveCommand,
)
from trainer.execution.executor import Executor
from trainer.megatron.roles.critic import MegatronCritic
from trainer.roles.models import RankModels

MEASURED = (
    "loss", "grad_norm", "value_loss", "critic_grad_norm", "value_mean", "return_mean", "explained_variance",
    "value_clip_fraction",
)  # fmt: skip


def measured(stats: StepStats) -> dict[str, float]:
    assert (stats.skipped, stats.warnings) == ("", ())
    return {name: getattr(stats, name) for name in MEASURED}


def run(layout: str, model_dir: Path, out: Path, checkpoint: Path | None = None) -> None:
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    models = make_models("megatron", model_dir, parallel=LAYOUTS[layout])
    first = LAYOUTS[layout].world_size == 1 or dist.get_rank() == 0
    for name, steps in (("after", _train), ("resumed", _resume)):
        if first:
            steps(Executor(models), out)
        else:
            Executor(models).follow()
        weights = dict(exported(models))
        if first:
            save_file(weights, out / f"{name}.safetensors")
    if checkpoint is not None and first:
        leader = Executor(models)
        leader.lead(RestoreCommand(str(checkpoint)))
        _save(leader, out / "moved")
        leader.lead(ExitCommand())
    elif checkpoint is not None:
        Executor(models).follow()
    models.close()


def exported(models: RankModels) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of the tensors of both models, on rank 0."""
    assert isinstance(models.critic, MegatronCritic)
    yield from ((f"policy.{name}", tensor.clone()) for name, tensor in models.policy.export())
    yield from ((f"critic.{name}", tensor.clone()) for name, tensor in critic_export(models.critic))


def _train(leader: Executor, out: Path) -> None:
    found = []
    for step in STEPS:
        found.append(measured(leader.train(command(step))[1]))
        if step == STEPS[0]:
            _save(leader, out / "after-one")
    (out / "stats.json").write_text(json.dumps(found))
    leader.lead(ExitCommand())


def _resume(leader: Executor, out: Path) -> None:
    """Restore into the models that continued; between steps the device is free."""
    leader.lead(RestoreCommand(str(out / "after-one")))
    for step in STEPS[1:]:
        leader.train(command(step))
        leader.lead(OffloadCommand())
        leader.lead(OnloadCommand())
    leader.lead(ExitCommand())


def _save(leader: Executor, directory: Path) -> None:
    directory.mkdir()
    leader.lead(SaveCommand(str(directory)))
    assert leader.lead(FinishSaveCommand()) == {}


if __name__ == "__main__":
    run(sys.argv[1], *map(Path, sys.argv[2:]))

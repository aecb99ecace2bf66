"""Runs steps of PPO in one layout, a rank each; rank 0 writes down the results.

As a module: LAYOUT MODEL_DIR OUT [CHECKPOINT], a checkpoint of another layout, to be saved again in this one.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.trainer.megatron.layouts import LAYOUTS
from tests.trainer.roles.ppo_steps import ALGORITHM, STEPS, command, make_models
from trainer.algorithms import make_algorithm
from trainer.backends.base import StepStats
from trainer.backends.follow import follow_commands
from trainer.backends.leader import LeaderRank
from trainer.megatron.roles.critic import MegatronCritic
from trainer.roles.models import RankModels

MEASURED = (
    "loss", "grad_norm", "value_loss", "critic_grad_norm", "value_mean", "return_mean", "explained_variance",
    "value_clip_fraction",
)  # fmt: skip


def measured(stats: StepStats) -> dict[str, float]:
    assert (stats.skipped, stats.warnings) == ("", ())
    return {name: asdict(stats)[name] for name in MEASURED}


def run(layout: str, model_dir: Path, out: Path, checkpoint: Path | None = None) -> None:
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    models = make_models("megatron", model_dir, parallel=LAYOUTS[layout])
    first = LAYOUTS[layout].world_size == 1 or dist.get_rank() == 0
    for name, steps in (("after", _train), ("resumed", _resume)):
        if first:
            steps(LeaderRank(models, make_algorithm(ALGORITHM)), out)
        else:
            follow_commands(models)
        weights = dict(exported(models))
        if first:
            save_file(weights, out / f"{name}.safetensors")
    if checkpoint is not None and first:
        leader = LeaderRank(models, make_algorithm(ALGORITHM))
        leader.restore(checkpoint)
        _save(leader, out / "moved")
        leader.exit()
    elif checkpoint is not None:
        follow_commands(models)
    models.close()


def exported(models: RankModels) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of the tensors of both models, on rank 0."""
    assert isinstance(models.critic, MegatronCritic)
    yield from ((f"policy.{name}", tensor.clone()) for name, tensor in models.policy.export())
    yield from ((f"critic.{name}", tensor.clone()) for name, tensor in models.critic.export())


def _train(leader: LeaderRank, out: Path) -> None:
    found = []
    for step in STEPS:
        found.append(measured(leader.train(command(step))[1]))
        if step == STEPS[0]:
            _save(leader, out / "after-one")
    (out / "stats.json").write_text(json.dumps(found))
    leader.exit()


def _resume(leader: LeaderRank, out: Path) -> None:
    """Restore into the models that continued; between steps the device is free."""
    leader.restore(out / "after-one")
    for step in STEPS[1:]:
        leader.train(command(step))
        leader.offload()
        leader.onload()
    leader.exit()


def _save(leader: LeaderRank, directory: Path) -> None:
    directory.mkdir()
    leader.begin_save(directory)
    leader.finish_save()


if __name__ == "__main__":
    run(sys.argv[1], *map(Path, sys.argv[2:]))

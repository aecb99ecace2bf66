"""Trains cases whose critic has ranks of its own, which follow the policy's.

As a module: BACKEND LAYOUT CRITIC_RANKS CRITIC_TENSOR_RANKS DIRECTORY OUT CASE...
"""

import faulthandler
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.trainer.megatron.launch import DEADLINE_S
from tests.trainer.megatron.layouts import LAYOUTS
from tests.trainer.recomputed.backend_run import (
    critic_weights,
    make_models,
    run_case,
    trainer_of,
    weights_of,
)
from tests.trainer.recomputed.cases import CASES, CRITIC, OPTIMIZER
from trainer.config import ParallelConfig
from trainer.execution.role_follower import CriticFollower, FollowerLink
from trainer.ranks.process_group import RankAssignment, join_model_ranks, rank_assignment
from trainer.ranks.wire import BetweenModels
from trainer.registry import make_remote_critic
from trainer.roles.config import PlacementConfig
from trainer.roles.critic import CriticSpec
from trainer.roles.remote import RoleLink


def policy_case(
    kind: str,
    parallel: ParallelConfig,
    assignment: RankAssignment,
    wires: Mapping[str, BetweenModels],
    name: str,
    *to: Path,
) -> None:
    """Make the steps of a case on a rank of the policy."""
    directory, out = to
    link = RoleLink(wires["critic"]) if wires else None
    models = make_models(kind, CASES[name], directory, parallel, remote_critic=link or "no link")
    if link is not None:
        link.await_ready()
    reports = run_case(models, CASES[name], directory, assignment.rank)
    weights = {tensor: values.clone() for tensor, values in weights_of(models).items()}
    models.close()
    if assignment.rank == 0:
        (out / name / "reports.json").write_text(json.dumps(reports))
        save_file(weights, out / name / "weights.safetensors")


def critic_case(
    kind: str, parallel: ParallelConfig, assignment: RankAssignment, wire: BetweenModels, *to: Path
) -> None:
    """Follow the steps of a case on a rank of the critic."""
    directory, out = to
    spec = CriticSpec(directory, directory, CRITIC, OPTIMIZER)
    critic, replicas = make_remote_critic(spec, parallel=parallel, trainer=trainer_of(kind))
    CriticFollower(critic, FollowerLink(wire, assignment.rank, replicas)).follow()
    weights = {tensor: values.clone() for tensor, values in critic_weights(critic).items()}
    if assignment.rank == 0:
        save_file(weights, out / "critic.safetensors")


def run(kind: str, layout: str, placement: PlacementConfig, directory: Path, out: Path, *names: str) -> None:
    torch.set_num_threads(1)
    parallel, remote_ranks = LAYOUTS[layout], placement.ranks
    assignment = rank_assignment(int(os.environ["RANK"]), parallel.world_size, remote_ranks)
    wires = join_model_ranks(parallel.world_size, remote_ranks, on_gpu=False, timeout_s=DEADLINE_S)
    for name in names:
        (out / name).mkdir(parents=True, exist_ok=True)
        if assignment.role:
            critic_case(kind, placement.layout("critic"), assignment, wires["critic"], directory, out / name)
        else:
            policy_case(kind, parallel, assignment, wires, name, directory, out)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(DEADLINE_S - 20, exit=True)
    ranks, tensor = map(int, sys.argv[3:5])
    placed = PlacementConfig(critic=ranks, critic_tensor_parallel_size=tensor)
    run(sys.argv[1], sys.argv[2], placed, Path(sys.argv[5]), Path(sys.argv[6]), *sys.argv[7:])

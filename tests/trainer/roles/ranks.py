"""Runs one rank of a layout with a frozen model; rank 0 writes down the results."""

import faulthandler
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.trainer.megatron.launch import DEADLINE_S
from tests.trainer.megatron.layouts import LAYOUTS
from tests.trainer.megatron.models import OPTIMIZER
from tests.trainer.megatron.ranks import part_of, whole
from tests.trainer.roles.by_hand import CASES, OTHER, STEPS, STUDENT, batch_of
from trainer.algorithms import make_algorithm
from trainer.backends.base import Backend, FrozenSpec
from trainer.backends.rank_commands import StepCommand
from trainer.batch import Batch
from trainer.config import TrainerConfig
from trainer.megatron.backend import MegatronBackend
from trainer.roles.frozen import FrozenModels, FrozenRole
from trainer.roles.models import RankModels
from trainer.roles.step import run_step

ROLE = {"distilled": "teacher", "penalised": "reference"}
"""Case -> what its frozen model is."""


def planned(case: str, step: int) -> Batch:
    """The batch with the weights and advantages that its plan would have."""
    batch, algorithm = batch_of(case, step), make_algorithm(CASES[case])
    advantages = algorithm.advantages(batch.rewards, batch.group_index)[batch.sample_index]
    sampled = torch.zeros(len(batch.rewards), dtype=torch.int64)
    sampled.index_add_(0, batch.sample_index, batch.sampled_mask.long())
    return replace(batch, advantages=advantages * batch.loss_mask, weights=algorithm.sample_weights(sampled))


def specs_of(case: str, models: Path, *, offload: bool = False) -> tuple[FrozenSpec, ...]:
    return (FrozenSpec(ROLE[case], models / OTHER, offload),) if case in ROLE else ()


def models_with(backend: Backend, case: str, specs: tuple[FrozenSpec, ...]) -> RankModels:
    roles = {
        spec.role: FrozenRole(backend.load_frozen(spec), backend.device, offload=spec.offload)
        for spec in specs
    }
    return RankModels(backend, frozen=FrozenModels(make_algorithm(CASES[case]), **roles))


def train(models: RankModels, case: str, cut: Any) -> list[dict[str, Any]]:
    """What each step measured; `cut` makes a rank's part of a batch."""
    command = StepCommand(reference_logprobs=CASES[case].kl_coef > 0)
    found = []
    for step in range(STEPS):
        (stats,) = run_step(models, cut(planned(case, step)), command)
        names = ("loss", "grad_norm", "teacher_kl_k1", "reward_kl_k1", "reference_kl_k3", "behaviour_kl_k3")
        found.append({name: getattr(stats, name) for name in names})
    return found


def run(layout: str, models: Path, out: Path) -> None:
    torch.set_num_threads(1)
    for case, config in CASES.items():
        specs = specs_of(case, models, offload=True)
        backend = MegatronBackend(
            models / STUDENT,
            parallel=LAYOUTS[layout],
            optimizer=OPTIMIZER,
            trainer=TrainerConfig(micro_batch_tokens=40, device="cpu"),
            algorithm=make_algorithm(config),
            frozen=specs,
        )
        rank = models_with(backend, case, specs)
        tensors = {
            f"opinion.{role}": whole(backend, batch_of(case, 0), getattr(rank.frozen, role).logprobs)
            for role in [spec.role for spec in specs]
        }
        stats = train(rank, case, lambda batch, backend=backend: part_of(backend, batch))
        tensors |= {f"weight.{name}": tensor.contiguous() for name, tensor in backend.export()}
        rank.offload()
        rank.onload()
        rank.close()
        if dist.get_rank() == 0 if dist.is_initialized() else True:
            out.mkdir(parents=True, exist_ok=True)
            save_file(tensors, out / f"{case}.safetensors")
            (out / f"{case}.json").write_text(json.dumps(stats))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(DEADLINE_S - 20, exit=True)
    run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))

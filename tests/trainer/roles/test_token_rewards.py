"""Tests teacher, reference, given tokens and penalised rewards against plain torch, over three steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.megatron.launch import launch
from tests.trainer.megatron.layouts import LAYOUTS
from tests.trainer.megatron.models import OPTIMIZER, save_model
from tests.trainer.roles.by_hand import CASES, OTHER, STUDENT, batch_of, trained_by_hand
from tests.trainer.roles.ranks import ROLE, models_with, planned, specs_of, train
from trainer.algorithms import make_algorithm
from trainer.backends.rank_commands import StepCommand
from trainer.config import TrainerConfig
from trainer.reference.backend import ReferenceBackend
from trainer.roles.step import run_step

LAYOUTS_OF_TWO = [
    "tp2",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("dp2", "pp2", "cp2", "tp2-sequence")),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for name in (STUDENT, OTHER):
        save_model(name, directory)
    return directory


def check(case: str, stats: list[dict[str, Any]], weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compare with the loop by hand; returns the frozen model's opinion of the first batch."""
    found, expected, opinion = trained_by_hand(case)
    for mine, (loss, norm) in zip(stats, found, strict=True):
        assert mine["loss"] == pytest.approx(loss, abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(norm, rel=1e-5, abs=1e-6)
    assert weights.keys() == expected.keys() - ({"lm_head.weight"} - weights.keys())
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0, msg=name)
    batch, first = batch_of(case, 0), stats[0]
    gaps = (batch.behaviour_logprobs - opinion).double()
    measured = {
        "distilled": ("teacher_kl_k1", gaps[batch.loss_mask].mean()),
        "penalised": ("reward_kl_k1", gaps[batch.sampled_mask].sum() / len(batch.rewards)),
    }
    for kind, (name, value) in measured.items():
        assert first[name] == (pytest.approx(float(value), abs=1e-5) if kind == case else None)
    assert (first["behaviour_kl_k3"] is None) == (case == "given")
    assert (first["reference_kl_k3"] is None) == (case != "penalised")
    return opinion


@pytest.mark.parametrize("case", CASES)
def test_the_reference_backend_trains_what_the_loop_by_hand_does(case: str, models: Path) -> None:
    backend = ReferenceBackend(
        models / STUDENT,
        optimizer=OPTIMIZER,
        trainer=TrainerConfig(micro_batch_size=7, device="cpu"),
        algorithm=make_algorithm(CASES[case]),
    )
    rank = models_with(backend, case, specs_of(case, models))
    opinions = [role.logprobs(batch_of(case, 0)) for role in rank.frozen.roles]
    opinion = check(case, train(rank, case, lambda batch: batch), dict(backend.export()))
    for mine in opinions:
        torch.testing.assert_close(mine, opinion, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS_OF_TWO)
def test_megatron_trains_what_the_loop_by_hand_does(layout: str, models: Path, tmp_path: Path) -> None:
    out, logs = tmp_path / layout, tmp_path / "logs"
    ranks = LAYOUTS[layout].world_size
    launch(ranks, "tests.trainer.roles.ranks", layout, str(models), str(out), logs=logs)
    for case in CASES:
        tensors = load_file(out / f"{case}.safetensors")
        weights = {
            name.removeprefix("weight."): t for name, t in tensors.items() if name.startswith("weight.")
        }
        opinion = check(case, json.loads((out / f"{case}.json").read_text()), weights)
        if case in ROLE:
            for of_rank in tensors[f"opinion.{ROLE[case]}"]:
                known = of_rank != 0
                assert known.any()
                torch.testing.assert_close(of_rank[known], opinion[known], atol=1e-5, rtol=0)


def test_a_penalty_is_of_the_whole_step_whatever_the_part(models: Path) -> None:
    """Rewards without a difference get advantages from the penalty alone."""
    case = "penalised"
    backend = ReferenceBackend(
        models / STUDENT,
        optimizer=OPTIMIZER,
        trainer=TrainerConfig(device="cpu"),
        algorithm=make_algorithm(CASES[case]),
    )
    rank = models_with(backend, case, specs_of(case, models))
    batch = planned(case, 0)
    batch.rewards.zero_()
    batch.advantages.zero_()
    (stats,) = run_step(rank, batch, StepCommand(reference_logprobs=True))
    assert stats.grad_norm is not None
    assert stats.grad_norm > 0

"""Makes the steps of a case with a training backend, on every rank."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.groups import whole
from tests.trainer.measured import flat
from tests.trainer.recomputed.cases import FIRST, TEMPERATURE, WITHOUT_TOKENS, Case, records
from trainer.backends.base import Backend
from trainer.backends.rank_commands import StepCommand
from trainer.data.packing import balance
from trainer.data.step_plan import plan_step
from trainer.roles.models import RankModels
from trainer.roles.step import run_step

NOT_OF_THE_RECIPE = ("micro_batches", "padding_share", "imbalance")
"""Statistics of how a batch is divided."""


def run_case(backend: Backend, case: Case, directory: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Make all steps; returns what each reported of the recipe."""
    if case.config.kl_coef:
        backend.keep_reference()
    reports = []
    for step, groups in enumerate(records(directory)):
        plan = plan_step(
            groups,
            step=FIRST + step,
            algorithm=case.made(),
            temperature=TEMPERATURE,
            decoupled=case.decoupled,
        )
        batch = whole(plan)
        pieces = balance(backend.costs(batch.lengths).tolist(), len(backend.replicas))
        replica = next(index for index, ranks in enumerate(backend.replicas) if rank in ranks)
        part = batch.select(torch.tensor(pieces[replica], dtype=torch.int64))
        threshold = case.config.second_moment_threshold
        command = StepCommand(
            reference_logprobs=case.config.kl_coef > 0,
            start_logprobs=threshold > 0,
            second_moment_threshold=threshold,
        )
        (stats,) = run_step(RankModels(backend), part, command)
        report = flat(stats)
        reports.append({key: value for key, value in report.items() if key not in NOT_OF_THE_RECIPE})
    return reports


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Compare what each step reports: the loss to 1e-6, and what a single token or the gradient of all can
    change to what float32 can say of a log-probability of -8."""
    for step, (report, wanted) in enumerate(zip(found, expected, strict=True)):
        skipped = report.pop("skipped")
        assert bool(skipped) == (step == WITHOUT_TOKENS)
        assert report == pytest.approx(wanted, rel=3e-6, abs=3e-6)
        assert report.get("loss") == pytest.approx(wanted.get("loss"), rel=0, abs=1e-6)


def differences(
    found: Iterable[tuple[str, torch.Tensor]], expected: dict[str, torch.Tensor]
) -> dict[str, float]:
    """The largest difference of each tensor."""
    exported = dict(found)
    assert exported.keys() == expected.keys()
    return {name: (exported[name].double() - tensor).abs().max().item() for name, tensor in expected.items()}

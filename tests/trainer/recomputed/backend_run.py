"""Makes the steps of a case with a training backend, on every rank."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.trainer.measured import flat
from tests.trainer.megatron.roles.critic_weights import critic_export
from tests.trainer.recomputed.cases import (
    CRITIC,
    FIRST,
    OPTIMIZER,
    REWARD_WEIGHT,
    WITHOUT_TOKENS,
    Case,
    other_model,
    records,
)
from trainer.backends.base import FrozenSpec
from trainer.config import ParallelConfig, TrainerConfig
from trainer.execution.commands import ExitCommand
from trainer.execution.executor import Executor
from trainer.fsdp.critic import FsdpCritic
from trainer.megatron.roles.critic import MegatronCritic
from trainer.reference.critic import ReferenceCritic
from trainer.registry import make_backend, make_critic
from trainer.roles.config import REWARD_MODEL
from trainer.roles.critic import Critic
from trainer.roles.models import FrozenModels, LocalFrozenModel, RankModels
from trainer.roles.remote import RemoteCritic, RoleLink
from trainer.step.plan import StepPlan

NOT_OF_THE_RECIPE = (
    "micro_batches",
    "padding_share",
    "shared_share",
    "computed_tokens",
    "imbalance",
    "updates",
    "updates_skipped",
)
"""Statistics of how a batch is divided."""
OF_RECORDS = ("truncated_tokens", "shaped_reward_mean")
"""Statistics of the plan that a recipe changes."""


def trainer_of(kind: str) -> TrainerConfig:
    return TrainerConfig(backend=kind, micro_batch_tokens=40, micro_batch_size=5, device="cpu")


def make_models(
    kind: str,
    case: Case,
    directory: Path,
    parallel: ParallelConfig | None = None,
    *,
    remote_critic: RoleLink | Literal["no link"] | None = None,
) -> RankModels:
    """This rank's parts of all models of a case; the critic is apart if rank 0 has a link to it."""
    trainer = trainer_of(kind)
    specs = [
        FrozenSpec(role, other_model(directory, role), offload=True, is_classifier=role == REWARD_MODEL)
        for role in case.frozen
    ]
    policy = make_backend(
        directory,
        parallel=parallel or ParallelConfig(),
        optimizer=OPTIMIZER,
        trainer=trainer,
        algorithm=case.made(),
        frozen=specs,
        critic_dir=directory if case.has_critic and remote_critic is None else None,
    )
    frozen = {
        spec.role: LocalFrozenModel(policy.load_frozen(spec), policy.device, offload=True) for spec in specs
    }
    critic: Critic | None = None
    link = None if remote_critic == "no link" else remote_critic
    if remote_critic is not None:
        critic = RemoteCritic(link, policy.replicas, CRITIC)
    elif case.has_critic:
        critic = make_critic(policy, directory, optimizer=OPTIMIZER, trainer=trainer, config=CRITIC)
    models = RankModels(
        policy,
        frozen=FrozenModels(**frozen, reward_weight=REWARD_WEIGHT),
        critic=critic,
        algorithm=case.made(),
        links={"critic": link} if link is not None else {},
    )
    if case.config.kl_coef:
        models.keep_reference()
    return models


def run_case(models: RankModels, case: Case, directory: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Make all steps; returns what each reported of the recipe, on rank 0."""
    if rank:
        Executor(models).follow()
        return []
    leader, reports = Executor(models), []
    for step, groups in enumerate(records(directory, case.branched)):
        plan, stats = leader.train(case.command(FIRST + step, groups))
        assert (stats.updates, stats.updates_skipped)[bool(stats.skipped)] == case.epochs
        assert stats.shared_share != 0 or not models.policy.shares_prefixes
        report = flat(stats) | of_records(plan)
        reports.append({key: value for key, value in report.items() if key not in NOT_OF_THE_RECIPE})
    leader.lead(ExitCommand())
    return reports


def of_records(plan: StepPlan) -> dict[str, float]:
    """What the recipe makes of the records before any model sees them."""
    found = {name: getattr(plan.stats, name) for name in OF_RECORDS}
    return {name: value for name, value in found.items() if value is not None}


def weights_of(models: RankModels) -> dict[str, torch.Tensor]:
    """The weights of the policy, and of the critic if there is one; called on every rank."""
    return dict(models.policy.export()) | critic_weights(models.critic)


def critic_weights(critic: Critic | None) -> dict[str, torch.Tensor]:
    """The weights of a critic that is on this rank; called on every rank that has one."""
    if isinstance(critic, MegatronCritic):
        return {f"critic.{name}": tensor for name, tensor in critic_export(critic)}
    if isinstance(critic, FsdpCritic):
        return {f"critic.{name}": tensor for name, tensor in critic.export()}
    if isinstance(critic, ReferenceCritic):
        return {f"critic.{name}": tensor.detach() for name, tensor in critic._trained.items()}
    return {}


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

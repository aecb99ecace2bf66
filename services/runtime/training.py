"""Builds a rank's models, and the command of a step, from the settings of a run."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from protocol.device.checkpoint_shapes import count_parameters, tensor_shapes
from services.ledger.interface import TakenBatch
from services.runtime.user_modules import add_user_modules
from services.settings.hub import fetch_critic, fetch_frozen, fetch_model
from services.settings.sections import Settings
from trainer.algorithms.registry import ALGORITHMS, make_algorithm
from trainer.backends.base import Backend, FrozenSpec
from trainer.execution.role_follower import CriticFollower, FollowerLink, FrozenFollower
from trainer.ranks.process_group import join_model_ranks, rank_assignment
from trainer.ranks.wire import BetweenModels
from trainer.registry import (
    make_backend,
    make_critic,
    make_draft_training,
    make_remote_critic,
    make_remote_frozen,
)
from trainer.roles.config import REWARD_MODEL
from trainer.roles.critic import Critic, CriticSpec
from trainer.roles.drafts import DraftTraining
from trainer.roles.entropy import EntropyControl
from trainer.roles.models import FrozenModels, LocalFrozenModel, RankModels
from trainer.roles.remote import RemoteCritic, RemoteFrozenModel, RoleLink
from trainer.step.train_command import TrainCommand

HEAD_ITEM_BYTES = 20
"""Bytes per parameter of a draft head: float32 master, published copy, two moments and gradient."""


def build_models(settings: Settings) -> RankModels:
    """Load and return this rank's models, on a rank of the policy.

    Rank 0 waits until models on separate ranks are loaded.
    """
    add_user_modules(settings)
    fix_order_of_sums(settings)
    links = {role: RoleLink(wire) for role, wire in _wires(settings).items()}
    policy, algorithm = build_backend(settings), make_algorithm(settings.algorithm)
    control = EntropyControl(settings.algorithm) if settings.algorithm.entropy_target else None
    roles = {
        spec.role: RemoteFrozenModel(links.get(spec.role), policy.replicas)
        if spec.is_remote
        else LocalFrozenModel(policy.load_frozen(spec), policy.device, offload=spec.offload)
        for spec in frozen_specs(settings)
    }
    models = RankModels(
        policy,
        entropy=control,
        frozen=FrozenModels(**roles, reward_weight=settings.reward_model.weight),
        critic=_critic(settings, policy, links.get("critic")),
        drafts=_drafts(settings, policy),
        algorithm=algorithm,
        links=links,
    )
    for link in links.values():
        link.await_ready()
    return models


def build_follower(settings: Settings, process: int) -> FrozenFollower | CriticFollower | None:
    """Load and return this rank's model on a separate rank; return None on a rank of the policy.

    Args:
        settings: settings of the run.
        process: global rank of this process under torchrun.

    Raises:
        SettingsError: the model cannot be loaded.
    """
    placement = settings.placement
    assignment = rank_assignment(process, settings.parallel.world_size, placement.ranks)
    if not assignment.role:
        return None
    add_user_modules(settings)
    fix_order_of_sums(settings)
    parallel, trainer = placement.layout(assignment.role), settings.trainer
    if assignment.role == "critic":
        directories = fetch_critic(settings), fetch_model(settings)
        critic_spec = CriticSpec(*directories, settings.critic, settings.optimizer)
        wire = _wires(settings)[assignment.role]
        critic, replicas = make_remote_critic(critic_spec, parallel=parallel, trainer=trainer)
        return CriticFollower(critic, FollowerLink(wire, assignment.rank, replicas))
    spec = next(spec for spec in frozen_specs(settings) if spec.role == assignment.role)
    wire = _wires(settings)[assignment.role]
    model, replicas = make_remote_frozen(spec, parallel=parallel, trainer=trainer)
    return FrozenFollower(assignment.role, model, FollowerLink(wire, assignment.rank, replicas))


def fix_order_of_sums(settings: Settings) -> None:
    """Make GPU kernels add in a fixed order in deterministic runs; CPU kernels always do.

    An operation without a deterministic kernel then raises torch's RuntimeError, which names the operation. A
    mere warning would let FlashAttention's backward pass add in any order.
    """
    if settings.run.deterministic and settings.trainer.device != "cpu" and torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product
        torch.use_deterministic_algorithms(True)


def _wires(settings: Settings) -> Mapping[str, BetweenModels]:
    """Join the process group of this process's model if models have separate ranks; return its links."""
    if not settings.placement.total:
        return {}
    trainer = settings.trainer
    return join_model_ranks(
        settings.parallel.world_size,
        settings.placement.ranks,
        on_gpu=trainer.device != "cpu" and torch.cuda.is_available(),
        timeout_s=trainer.process_group_timeout_s,
    )


def frozen_specs(settings: Settings) -> tuple[FrozenSpec, ...]:
    """Return the frozen models of a run; hub models are downloaded unless present.

    Includes the initial policy if the reference model has separate ranks.

    Raises:
        SettingsError: as `fetch_frozen`.
    """
    remote_ranks = settings.placement.ranks
    found = dict(fetch_frozen(settings))
    if "reference" in remote_ranks:
        found.setdefault("reference", fetch_model(settings))
    return tuple(
        FrozenSpec(
            role, directory, getattr(settings, role).offload, role in remote_ranks, role == REWARD_MODEL
        )
        for role, directory in found.items()
    )


def _critic(settings: Settings, policy: Backend, link: RoleLink | None) -> Critic | None:
    """Load this rank's part of the critic, or its link to a separate critic; None without a critic."""
    if not settings.needs_critic:
        return None
    if settings.placement.critic:
        return RemoteCritic(link, policy.replicas, settings.critic)
    return make_critic(
        policy,
        fetch_critic(settings),
        optimizer=settings.optimizer,
        trainer=settings.trainer,
        config=settings.critic,
    )


def _drafts(settings: Settings, policy: Backend) -> DraftTraining | None:
    """Load the training of the engines' draft head; None if the head is not trained."""
    head = settings.engine.trained_head
    return make_draft_training(policy, Path(head), settings.engine.draft_lr) if head else None


def build_backend(settings: Settings) -> Backend:
    """Load and return this rank's part of the policy."""
    model_dir = fetch_model(settings)
    return make_backend(
        model_dir,
        parallel=settings.parallel,
        optimizer=settings.optimizer,
        trainer=settings.trainer,
        algorithm=make_algorithm(settings.algorithm),
        adapters=settings.lora,
        shared=settings.shares_masters,
        frozen=frozen_specs(settings),
        critic_dir=fetch_critic(settings) if settings.is_critic_on_policy_ranks else None,
        served=settings.served_bytes(_parameters(model_dir)) + head_bytes(settings),
    )


def head_bytes(settings: Settings) -> int:
    """Return the bytes per rank of a trained draft head and its training state."""
    head = settings.engine.trained_head
    return HEAD_ITEM_BYTES * _parameters(Path(head)) if head else 0


def _parameters(directory: Path) -> int:
    return count_parameters(tensor_shapes(directory))


def train_command(
    settings: Settings, batch: TakenBatch, records: Sequence[bytes], *, mask_late: bool = True
) -> TrainCommand:
    """Return the command that trains on a taken batch.

    Args:
        settings: settings of the run.
        batch: step and groups of the batch.
        records: encoded `ScoredRollout` of each group, in the order of `batch.groups`.
        mask_late: whether tokens over the bound are masked; otherwise they are an error.
    """
    return TrainCommand(
        step=batch.step,
        records=list(records),
        bounds=[group.max_staleness for group in batch.groups],
        mask_late=mask_late,
        temperature=settings.sampling.temperature or 1.0,
        recompute_logprobs=settings.trainer.recompute_logprobs,
        reference_logprobs=settings.algorithm.kl_coef > 0,
        mismatch_share=0.0
        if ALGORITHMS[settings.algorithm.name].on_data or settings.lora.dropout
        else settings.trainer.mismatch_share,
        epochs=settings.trainer.epochs_per_batch,
        mini_batches=settings.trainer.num_mini_batches,
        seed=settings.trainer.seed,
        max_tokens=settings.sampling.max_tokens,
    )

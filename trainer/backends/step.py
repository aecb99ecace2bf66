"""Makes a step on all ranks, from rank 0."""

import dataclasses
from collections.abc import Callable

from protocol.codec import decode_payload
from protocol.errors import ProtocolError
from protocol.messages import ScoredRollout
from trainer.algorithms.base import Algorithm
from trainer.backends.base import StepStats
from trainer.backends.rank_commands import StepCommand, TrainCommand, broadcast_command
from trainer.backends.scatter_batch import send_part
from trainer.data.step_plan import StepPlan, plan_step
from trainer.roles.merged_updates import merged_updates
from trainer.roles.models import RankModels
from trainer.roles.step import run_step
from trainer.weights.early_export import Tensors


def run_step_on_all_ranks(
    models: RankModels,
    algorithm: Algorithm,
    command: TrainCommand,
    begin: Callable[[Tensors], None] | None = None,
) -> tuple[StepPlan, StepStats]:
    """Make a step from rank 0: plan it, send every replica its part, then step on all ranks.

    Args:
        models: rank 0's part of them.
        algorithm: the recipe.
        command: that of the step.
        begin: see `Backend.export_ahead`.

    Raises:
        ProtocolError, BoundViolation: as `plan_command`; no rank has done anything then.
    """
    plan, backend = plan_command(command, algorithm), models.policy
    costs = backend.costs(plan.lengths)
    pieces, imbalance = plan.mini_batches.divide(costs, len(backend.replicas))
    follow = _step_command(command, plan, algorithm)
    broadcast_command(follow)
    for ranks, piece in zip(backend.replicas[1:], pieces[1:], strict=True):
        send_part(plan.part(piece), ranks)
    own = plan.part(pieces[0])
    send_part(own, [rank for rank in backend.replicas[0] if rank != 0])
    with backend.export_ahead(begin, len(follow.updates)).step():
        stats = merged_updates(algorithm.config, run_step(models, own, follow), follow)
    return plan, dataclasses.replace(stats, imbalance=imbalance)


def plan_command(command: TrainCommand, algorithm: Algorithm) -> StepPlan:
    """Plan the step of a command.

    Raises:
        ProtocolError: a record is not a scored rollout, or `plan_step` refuses it.
        BoundViolation: a token over the bound would carry gradient.
    """
    return plan_step(
        ((_scored(record), bound) for record, bound in zip(command.records, command.bounds, strict=True)),
        step=command.step,
        algorithm=algorithm,
        temperature=command.temperature,
        mask_late=command.mask_late,
        decoupled=command.recompute_logprobs,
        mismatch_share=command.mismatch_share,
        mini_batches=command.mini_batches,
        seed=command.seed,
        max_tokens=command.max_tokens,
    )


def _step_command(command: TrainCommand, plan: StepPlan, algorithm: Algorithm) -> StepCommand:
    config, updates = algorithm.config, plan.mini_batches.order(command.epochs)
    several = len(updates) > 1
    proximal = plan.decoupled and config.proximal_policy == "start"
    later = several and (proximal or bool(config.rejection_level))
    return StepCommand(
        command.reference_logprobs,
        updates=updates,
        mini_batches=plan.mini_batches.totals if several else (),
        start_logprobs=later,
        second_moment_threshold=config.second_moment_threshold,
    )


def _scored(record: bytes) -> ScoredRollout:
    message = decode_payload(record)
    if not isinstance(message, ScoredRollout):
        raise ProtocolError(f"spool record is a {type(message).__name__}, not a ScoredRollout")
    return message

"""Defines the command for a training step, plans the step, and schedules the updates of all ranks."""

import msgspec

from protocol.codec import decode_payload
from protocol.errors import ProtocolError
from protocol.messages import ScoredRollout
from trainer.algorithms.base import Algorithm
from trainer.batch import StepTotals
from trainer.step.plan import StepPlan, plan_step


class TrainCommand(msgspec.Struct, frozen=True):
    """Groups to train in one step.

    Not sent to ranks: `Executor.train`, on rank 0, turns this command into a `StepCommand` with an
    `UpdateSchedule` for all ranks.
    """

    step: int
    """Version that the step starts from."""
    records: list[bytes]
    """Encoded `ScoredRollout` of each group, as stored in the spool."""
    bounds: list[int]
    """max_staleness of each group's lease, versions."""
    mask_late: bool
    """Whether to mask tokens over the bound; otherwise such a token is an error."""
    temperature: float
    """Sampling temperature of the tokens."""
    recompute_logprobs: bool
    """Whether the trainer's log-probabilities at the start of the step are the proximal policy."""
    reference_logprobs: bool
    """Whether to compute log-probabilities under the reference model before the step."""
    mismatch_share: float = 1.0
    """Share of the groups whose trainer-engine mismatch is measured, 0 to 1."""
    epochs: int = 1
    """Number of times that each sample is trained."""
    mini_batches: int = 1
    """Number of mini-batches of the batch. Each mini-batch is one update."""
    seed: int = 0
    """With the number of the step, the seed of the assignment to mini-batches."""
    max_tokens: int = 0
    """Token limit of one generation."""
    profile: str = ""
    """Path prefix of the profiles of the updates; each rank appends .rank_R.json.gz. Empty: no profile."""


class UpdateSchedule(msgspec.Struct, frozen=True):
    """Updates of a step, and the passes before them; equal on every rank."""

    reference_logprobs: bool
    """Whether to compute log-probabilities under the reference model before the updates."""
    updates: tuple[int, ...] = (0,)
    """Index of the mini-batch of each update, in order."""
    mini_batches: tuple[StepTotals, ...] = ()
    """Totals of each mini-batch; empty if the step is one update on the whole batch."""
    start_logprobs: bool = False
    """Whether to compute log-probabilities under the policy at the start of the step in a separate pass."""
    second_moment_threshold: float = 0.0
    """The setting `algorithm.second_moment_threshold`; 0: off. If set, each update begins with a forward
    pass."""


def plan_command(command: TrainCommand, algorithm: Algorithm) -> StepPlan:
    """Plan the step of a command.

    Raises:
        ProtocolError: a record is not a scored rollout, or `plan_step` rejects the record.
        BoundViolation: a token over the bound would carry gradient.
    """
    return plan_step(
        (
            (decode_scored(record), bound)
            for record, bound in zip(command.records, command.bounds, strict=True)
        ),
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


def schedule_updates(command: TrainCommand, plan: StepPlan, algorithm: Algorithm) -> UpdateSchedule:
    """Return the updates of a planned step."""
    config, updates = algorithm.config, plan.mini_batches.order(command.epochs)
    several = len(updates) > 1
    proximal = plan.decoupled and config.proximal_policy == "start"
    return UpdateSchedule(
        command.reference_logprobs,
        updates=updates,
        mini_batches=plan.mini_batches.totals if several else (),
        start_logprobs=several and (proximal or bool(config.rejection_level)),
        second_moment_threshold=config.second_moment_threshold,
    )


def decode_scored(record: bytes) -> ScoredRollout:
    """Decode a record of the spool. Raises ProtocolError if the record is not a `ScoredRollout`."""
    message = decode_payload(record)
    if not isinstance(message, ScoredRollout):
        raise ProtocolError(f"spool record is a {type(message).__name__}, not a ScoredRollout")
    return message

"""Defines a step as rank 0 is asked for it, its plan, and the updates that every rank makes."""

import msgspec

from protocol.codec import decode_payload
from protocol.errors import ProtocolError
from protocol.messages import ScoredRollout
from trainer.algorithms.base import Algorithm
from trainer.batch import StepTotals
from trainer.step.plan import StepPlan, plan_step


class TrainCommand(msgspec.Struct, frozen=True):
    """Groups to make a step of.

    Not a command of ranks: `Executor.train`, on rank 0, makes a `StepCommand` of it, with an
    `UpdateSchedule` for all ranks.
    """

    step: int
    """Version that the step starts from."""
    records: list[bytes]
    """Encoded `ScoredRollout` of each group, as the spool holds it."""
    bounds: list[int]
    """max_staleness of each group's lease, versions."""
    mask_late: bool
    """Whether tokens over the bound are masked; else one is an error."""
    temperature: float
    """Temperature at which the tokens were sampled."""
    recompute_logprobs: bool
    """Whether the trainer's own log-probabilities at the start of the step are the proximal ones."""
    reference_logprobs: bool
    """Whether to compute log-probabilities under the reference model before the step."""
    mismatch_share: float = 1.0
    """Share of the groups whose mismatch of trainer and engine is measured, 0 to 1."""
    epochs: int = 1
    """Times that each sample is trained."""
    mini_batches: int = 1
    """Parts that the batch is divided into, each of which is an update."""
    seed: int = 0
    """Decides the division, with the number of the step."""
    max_tokens: int = 0
    """Limit of one generation, tokens."""
    profile: str = ""
    """Path of the profiles of the updates; each rank adds .rank_R.json.gz. Empty: none is made."""


class UpdateSchedule(msgspec.Struct, frozen=True):
    """Updates of a step, and the passes before them; equal on every rank."""

    reference_logprobs: bool
    """Whether to compute log-probabilities under the reference model before the updates."""
    updates: tuple[int, ...] = (0,)
    """The mini-batch of each update, in order."""
    mini_batches: tuple[StepTotals, ...] = ()
    """Totals of each mini-batch; empty: the step is one update on all of its batch."""
    start_logprobs: bool = False
    """Whether updates need the log-probabilities under the policy at the start of the step from a pass."""
    second_moment_threshold: float = 0.0
    """As the setting of that name; 0: off. Each update then begins with a pass."""


def plan_command(command: TrainCommand, algorithm: Algorithm) -> StepPlan:
    """Plan the step of a command.

    Raises:
        ProtocolError: a record is not a scored rollout, or `plan_step` refuses it.
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
    """Decode a record of the spool. Raises ProtocolError: it is no scored rollout."""
    message = decode_payload(record)
    if not isinstance(message, ScoredRollout):
        raise ProtocolError(f"spool record is a {type(message).__name__}, not a ScoredRollout")
    return message

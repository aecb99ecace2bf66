"""Turns a rollout into its scored form, or into the message that it could not be scored."""

import time
from collections.abc import Sequence

import msgspec

from protocol.errors import ProtocolError, RewardError
from protocol.messages import Remark, Rollout, ScoredRollout, ScoreFailure
from protocol.rollout_view import sample_lengths
from protocol.tensors import Array
from reward.combine import VerifierError
from reward.turns import GroupTurns
from reward.workers.pool import ScorePool

MAX_ERROR = 500
"""Characters of an error that are sent."""
MAX_REMARK = 2000
"""Characters of a judge's text about one sample."""
MAX_REMARKS = 64_000
"""Characters of what judges said of a group."""


async def score_rollout(rollout: Rollout, pool: ScorePool, scorer: str) -> ScoredRollout | ScoreFailure:
    """Score a group; an error while scoring becomes a `ScoreFailure`, never a reward.

    Args:
        rollout: the group.
        pool: runs the verifiers.
        scorer: incarnation of this reward worker.
    """
    began = time.perf_counter()
    remarks: list[Remark] = []
    try:
        environment = None
        if rollout.environment_rewards is not None:
            rewards = rollout.environment_rewards.numpy()
            if rewards.shape != (len(rollout.responses),):
                raise ProtocolError(
                    f"environment_rewards of shape {list(rewards.shape)} for {len(rollout.responses)} samples"
                )
            environment = rewards.tolist()
        turns = GroupTurns.of(rollout)
        combined, components = await pool.score(
            rollout.prompt_text,
            rollout.responses,
            rollout.metadata,
            environment,
            sample_lengths(rollout),
            rollout.finish_reasons,
            remarks,
            turns,
        )
    except (RewardError, ProtocolError) as error:
        verifier = error.verifier if isinstance(error, VerifierError) else ""
        text = error.error if isinstance(error, VerifierError) else str(error)
        return ScoreFailure(
            group=rollout.group, token=rollout.token, verifier=verifier, error=text[:MAX_ERROR], scorer=scorer
        )
    return ScoredRollout(
        rollout=rollout,
        rewards=Array.of(combined, "float32"),
        components={name: Array.of(scores, "float32") for name, scores in components.items()},
        scorer=scorer,
        score_s=time.perf_counter() - began,
        remarks=bounded(remarks),
        turn_rewards=_flattened(turns.rewards) if turns.rewards and rollout.turns is not None else None,
        turn_components={name: _flattened(scores) for name, scores in turns.components.items()}
        if rollout.turns is not None
        else {},
    )


def _flattened(values: Sequence[Sequence[float]]) -> Array:
    """Return [n][K_i] as float32 [K]."""
    return Array.of([value for sample_turns in values for value in sample_turns], "float32")


def bounded(remarks: Sequence[Remark]) -> tuple[Remark, ...]:
    """Return remarks in the order of samples, with texts short enough to be kept with the group."""
    most = min(MAX_REMARK, MAX_REMARKS // max(1, len(remarks)))
    ordered = sorted(remarks, key=lambda remark: (remark.sample, remark.verifier))
    return tuple(msgspec.structs.replace(remark, text=remark.text[:most]) for remark in ordered)

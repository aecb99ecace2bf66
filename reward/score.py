"""Converts a rollout to a scored rollout, or to a failure message."""

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
"""Maximum number of characters of an error in a message."""
MAX_REMARK = 2000
"""Maximum number of characters of a judge's text about one sample."""
MAX_REMARKS = 64_000
"""Maximum number of characters of all judges' texts about a group."""


async def score_rollout(rollout: Rollout, pool: ScorePool, scorer: str) -> ScoredRollout | ScoreFailure:
    """Score a group. A scoring error becomes a `ScoreFailure`, never a reward.

    Args:
        rollout: group to score.
        pool: pool that runs the verifiers.
        scorer: incarnation of this reward worker.
    """
    began = time.perf_counter()
    try:
        environment = None
        if rollout.environment_rewards is not None:
            rewards = rollout.environment_rewards.numpy()
            if rewards.shape != (len(rollout.responses),):
                raise ProtocolError(
                    f"environment_rewards of shape {list(rewards.shape)} for {len(rollout.responses)} samples"
                )
            environment = rewards.tolist()
        scores = await pool.score(
            rollout.prompt_text,
            rollout.responses,
            rollout.metadata,
            environment,
            sample_lengths(rollout),
            rollout.finish_reasons,
            GroupTurns.of(rollout),
        )
    except (RewardError, ProtocolError) as error:
        verifier = error.verifier if isinstance(error, VerifierError) else ""
        text = error.error if isinstance(error, VerifierError) else str(error)
        return ScoreFailure(
            group=rollout.group, token=rollout.token, verifier=verifier, error=text[:MAX_ERROR], scorer=scorer
        )
    turn_rewards, turn_components = None, {}
    if rollout.turns is not None and scores.turn_rewards:
        turn_rewards = _flat(scores.turn_rewards)
        turn_components = {name: _flat(values) for name, values in scores.turn_components.items()}
    return ScoredRollout(
        rollout=rollout,
        rewards=Array.of(scores.rewards, "float32"),
        components={name: Array.of(values, "float32") for name, values in scores.components.items()},
        scorer=scorer,
        score_s=time.perf_counter() - began,
        remarks=bounded(scores.remarks),
        turn_rewards=turn_rewards,
        turn_components=turn_components,
    )


def _flat(values: Sequence[Sequence[float]]) -> Array:
    """Flatten [n][K_i] to float32 [K]."""
    return Array.of([value for by_sample in values for value in by_sample], "float32")


def bounded(remarks: Sequence[Remark]) -> tuple[Remark, ...]:
    """Return remarks ordered by sample, with texts truncated for storage with the group."""
    max_chars = min(MAX_REMARK, MAX_REMARKS // max(1, len(remarks)))
    ordered = sorted(remarks, key=lambda remark: (remark.sample, remark.verifier))
    return tuple(msgspec.structs.replace(remark, text=remark.text[:max_chars]) for remark in ordered)

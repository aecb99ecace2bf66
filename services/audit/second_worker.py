"""Scores recorded groups a second time, in worker processes of the audit's own."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from protocol.messages import Rollout, ScoredRollout
from reward.config import RewardConfig
from reward.score import score_rollout
from reward.workers.pool import ScorePool

log = logging.getLogger("tether.audit")

SCORE_S = 600.0
"""Limit of scoring one group again, seconds."""
Rewards = Callable[[Rollout], Sequence[float] | None]
"""Returns the rewards of a group's samples; None: it cannot be scored. Called in a thread."""


def can_score_again(config: RewardConfig) -> bool:
    """Return whether a second call is cheap and gives the same.

    A judge's answers cost money, and need not be the same; a reward model is loaded by each worker.
    """
    return not any("judge" in one.name or "reward_model" in one.name for one in config.verifiers)


@asynccontextmanager
async def second_worker(config: RewardConfig, modules: Sequence[str]) -> AsyncIterator[Rewards]:
    """Start workers; of verifiers that are not called again there are none, and no group can be scored.

    Args:
        config: of the run, with the number of workers.
        modules: directories with modules of the user.
    """
    if not can_score_again(config):
        yield lambda rollout: None
        return
    loop = asyncio.get_running_loop()
    async with ScorePool(config, modules) as pool:

        def rewards(rollout: Rollout) -> Sequence[float] | None:
            scored = asyncio.run_coroutine_threadsafe(score_rollout(rollout, pool, "audit"), loop)
            found = scored.result(SCORE_S)
            if not isinstance(found, ScoredRollout):
                log.warning("audit.not_scored group=%d error=%s", rollout.group, found.error)
                return None
            values: list[float] = found.rewards.numpy().tolist()
            return values

        yield rewards

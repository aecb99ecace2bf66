"""Scores recorded groups a second time, in the audit's own worker processes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager

from protocol.messages import Rollout, ScoredRollout
from reward.config import RewardConfig, can_score_again, runs_code
from reward.score import score_rollout
from reward.workers.pool import ScorePool
from services.audit.records import decided_by_time

log = logging.getLogger("tether.audit")

SCORE_S = 600.0
"""Timeout of scoring one group again, seconds."""
Rewards = Callable[[Rollout], Sequence[float | None] | None]
"""Returns the rewards of a group's samples: None for a sample that a timeout decided, and for a group that
cannot be scored. Called in a thread."""


@asynccontextmanager
async def second_worker(
    config: RewardConfig, modules: Sequence[str], withheld: Collection[str] = ()
) -> AsyncIterator[Rewards]:
    """Start workers; without repeatable verifiers no workers start and no group is scored.

    Args:
        config: reward settings of the run, with the number of workers.
        modules: directories with modules of the user.
        withheld: environment variables that the workers do not inherit.
    """
    if not can_score_again(config) or runs_code(config):
        yield lambda rollout: None
        return
    loop = asyncio.get_running_loop()
    async with ScorePool(config, modules, withheld) as pool:

        def rewards(rollout: Rollout) -> Sequence[float | None] | None:
            scored = asyncio.run_coroutine_threadsafe(score_rollout(rollout, pool, "audit"), loop)
            try:
                result = scored.result(SCORE_S)
            except TimeoutError:
                scored.cancel()
                log.warning("audit.not_scored group=%d error=not within %g s", rollout.group, SCORE_S)
                return None
            if not isinstance(result, ScoredRollout):
                log.warning("audit.not_scored group=%d error=%s", rollout.group, result.error)
                return None
            values: list[float] = result.rewards.numpy().tolist()
            times = decided_by_time(result)
            return [None if is_late else value for value, is_late in zip(values, times, strict=True)]

        yield rewards

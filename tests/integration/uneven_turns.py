"""An environment whose episodes are of different lengths, and that rewards the long ones."""

import itertools

from rollout.environments.episode import Episode

_numbers = itertools.count()


async def play(episode: Episode) -> float:
    """Make 1, 2, 3 or 4 turns of a token; the reward is their number."""
    turns = 1 + next(_numbers) % 4
    for _ in range(turns):
        await episode.generate(max_tokens=1)
    return float(turns)

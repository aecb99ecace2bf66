"""An environment that fails: sample after sample of some prompts, all samples of others."""

from collections import Counter

from rollout.environments.episode import Episode

_begun: Counter[int] = Counter()


async def play(episode: Episode, *, group: int) -> float:
    """Fail all episodes of prompt `group`, and the first two of each other one."""
    index = episode.prompt.index
    _begun[index] += 1
    fails = index == group or _begun[index] <= 2
    said = await episode.generate()
    if fails:
        raise RuntimeError(f"the board of {index} broke")
    episode.insert("+")
    return float(said + await episode.generate() == episode.metadata["answer"])

"""An environment that fails: sample after sample of some prompts, all samples of others."""

from rollout.environments.episode import Episode

_begun: dict[int, int] = {}


async def play(episode: Episode, *, group: int) -> float:
    """Fail all episodes of prompt `group`, and the first two of each other one."""
    index = episode.prompt.index
    _begun[index] = _begun.get(index, 0) + 1
    said = await episode.generate()
    if index == group or _begun[index] <= 2:
        raise RuntimeError(f"the board of {index} broke")
    episode.insert("+")
    return float(said + await episode.generate() == episode.metadata["answer"])

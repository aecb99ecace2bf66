"""An environment as a user writes it."""

from rollout.environments.episode import Episode


class Game:
    """Asks for more, turn after turn."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    async def play(self, episode: Episode) -> float:
        said = await episode.generate()
        for _ in range(self.turns - 1):
            episode.insert("more")
            said += await episode.generate()
        return float("7" in said)

"""Plays single-player games of textarena, with prompts from the source `textarena`.

The reward is the game's own: usually between 0 and 1, and -1 for illegal moves.
"""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from protocol.errors import EpisodeError, SettingsError
from rollout.environments.episode import Episode, EpisodeEnvironment
from rollout.text_games import TextGame, in_game_thread


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `textarena`."""

    turn_tokens: Annotated[int, Interval(ge=0, le=10**7)] = 0
    """Maximum sampled tokens per turn. 0: `sampling.max_tokens`."""
    truncated_reward: Annotated[float, Interval(ge=-1e6, le=1e6)] = 0.0
    """Reward of a game truncated by `environment.max_turns` or `engine.max_model_len`."""


class TextArena:
    """Player of one game per episode."""

    def __init__(self, options: Options) -> None:
        self._options = options

    async def play(self, episode: Episode) -> float:
        """Play the prompt's game to its end.

        Raises:
            SettingsError: the prompt is not from the source `textarena`.
            EpisodeError: the game's opening differs from the prompt.
        """
        try:
            name, seed = str(episode.metadata["game"]), int(episode.metadata["seed"])
        except (KeyError, TypeError, ValueError):
            raise SettingsError(
                f"prompt {episode.prompt.index}: the environment textarena needs a game and a seed; set "
                "prompts.source to 'textarena'"
            ) from None
        game: TextGame = await in_game_thread(TextGame, name, seed, episode.metadata.get("params", {}))
        if game.opening != episode.prompt.text:
            raise EpisodeError("error", f"{name} with seed {seed} has a different opening than its prompt")
        episode.reward = self._options.truncated_reward
        while True:
            turn = await episode.generate(self._options.turn_tokens or None)
            reply: str | None = await in_game_thread(game.step, turn)
            if reply is None:
                return game.reward()
            episode.insert(reply)


def make(options: Options) -> EpisodeEnvironment:
    """Return the environment."""
    return EpisodeEnvironment(TextArena(options).play)

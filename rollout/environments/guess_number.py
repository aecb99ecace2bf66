"""Plays a guessing game of several turns: the environment answers each guess with "higher" or "lower".

The secret number is the prompt's `answer`. The reward decreases linearly with the number of guesses: 1 for
the first of K guesses, 1/K for the last, and 0 if all are wrong.
"""

import re
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from protocol.errors import SettingsError
from rollout.environments.episode import Episode, EpisodeEnvironment
from rollout.prompts.base import Prompt

GUESS = re.compile(r"-?\d{1,18}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `guess_number`."""

    max_turns: Annotated[int, Interval(ge=1)] = 6
    """K, the maximum number of guesses."""
    turn_tokens: Annotated[int, Interval(ge=1)] = 16
    """Maximum sampled tokens per turn."""
    higher: str = " higher "
    """Reply to a guess that is too low."""
    lower: str = " lower "
    """Reply to a guess that is too high."""
    not_a_number: str = " ? "
    """Reply to a turn without a number."""


class GuessNumber:
    """Player of the game; the guess is the last number in a turn."""

    def __init__(self, options: Options) -> None:
        self._options = options

    async def play(self, episode: Episode) -> float:
        """Play one game.

        Raises:
            SettingsError: the prompt's answer is not a whole number.
        """
        secret = _secret(episode.prompt)
        episode.reward = 0.0
        turns = self._options.max_turns
        for turn in range(turns):
            numbers = GUESS.findall(await episode.generate(self._options.turn_tokens))
            guess = int(numbers[-1]) if numbers else None
            if guess == secret:
                return (turns - turn) / turns
            episode.insert(self._reply(guess, secret))
        return 0.0

    def _reply(self, guess: int | None, secret: int) -> str:
        if guess is None:
            return self._options.not_a_number
        return self._options.higher if guess < secret else self._options.lower


def make(options: Options) -> EpisodeEnvironment:
    """Return the environment."""
    return EpisodeEnvironment(GuessNumber(options).play)


def _secret(prompt: Prompt) -> int:
    try:
        return int(prompt.metadata["answer"])
    except (KeyError, TypeError, ValueError):
        raise SettingsError(
            f"prompt {prompt.index}: guess_number needs a whole number as the answer"
        ) from None

"""Plays single-player games of the package textarena.

Its games draw from the global random numbers of Python and numpy, and some take seconds to begin. So they run
in one thread of their own, and the state of these numbers is kept with each game: the same seed and the same
actions give the same game, however many are played at the same time.
"""

import asyncio
import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from protocol.choices import checked_name, did_you_mean
from protocol.errors import SettingsError

SUFFIXES = ("-raw", "-train")
"""Ends of the names of the same game with wrappers, which are not used here."""

_thread = ThreadPoolExecutor(1, thread_name_prefix="textarena")


class TextGame:
    """One game in progress. Its methods block; `in_game_thread` is where they may."""

    def __init__(self, name: str, seed: int, params: Mapping[str, Any]) -> None:
        """Begin a game.

        Args:
            name: of the game, such as "GuessTheNumber-v0".
            seed: of its random numbers.
            params: parameters of the game instead of its own.

        Raises:
            SettingsError: the game cannot be made, needs several players, the network, or data that is not
                there.
        """
        import textarena

        source = random.Random(seed)
        self._random: tuple[Any, Any] = (
            source.getstate(),
            np.random.RandomState(source.getrandbits(32)).get_state(),
        )
        try:
            with self._draws():
                self._game = textarena.make(f"{name}-raw", **params)
                self._game.reset(num_players=1, seed=seed)
                self.opening = self._told()
                """The game's first words."""
        except Exception as error:  # games raise anything
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise SettingsError(f"textarena game {name} with seed {seed} cannot begin: {problem}") from None

    def step(self, action: str) -> str | None:
        """Act; return the game's next text, or None if it has ended.

        An action without brackets is put into brackets, as the games expect it.
        """
        with self._draws():
            done, _ = self._game.step(action if "[" in action or "]" in action else f"[{action.strip()}]")
            return None if done else self._told()

    def reward(self) -> float:
        """Return the player's reward; the game has ended."""
        rewards, _ = self._game.close()
        return float(rewards[0])

    @contextmanager
    def _draws(self) -> Iterator[None]:
        """Use the game's state of the global random numbers inside the block, and restore it after."""
        outside = random.getstate(), np.random.get_state()
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])
        try:
            yield
        finally:
            self._random = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])

    def _told(self) -> str:
        """Return the game's text since the last call."""
        from textarena import GAME_ID

        _, observation = self._game.get_observation()
        return "\n".join(text for sender, text, _ in observation if sender == GAME_ID)


async def in_game_thread(function: Any, *arguments: Any) -> Any:
    """Call a function in the thread of the games. If this is cancelled, the call that runs still ends."""
    return await asyncio.get_running_loop().run_in_executor(_thread, function, *arguments)


def checked_games(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return names of games that textarena has.

    Raises:
        SettingsError: the package is missing, there is no name, or one is unknown.
    """
    try:
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError as error:
        raise SettingsError(
            f"textarena is not installed ({error}); pip install 'tether-rl[textarena]'"
        ) from None
    games = [name for name in ENV_REGISTRY if not name.endswith(SUFFIXES)]
    if not names:
        raise SettingsError("setting prompts.families: name at least one game, such as GuessTheNumber-v0")
    for name in names:
        if name.endswith(SUFFIXES):
            raise SettingsError(
                f"setting prompts.families: {name!r} is not known; {did_you_mean(name, games)}"
            )
        checked_name(name, games, "setting prompts.families: game")
    return names

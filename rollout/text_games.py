"""Plays single-player games of the textarena package.

The games use the global random generators of Python and NumPy, and some take seconds to start. All games run
in one dedicated thread, and each game keeps its own generator state. Equal seeds and equal actions therefore
give equal games, even when games run concurrently.
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
"""Name suffixes of wrapped variants of a game; unused here."""

_thread = ThreadPoolExecutor(1, thread_name_prefix="textarena")


class TextGame:
    """Game in progress; its methods block and are called through `in_game_thread`."""

    def __init__(self, name: str, seed: int, params: Mapping[str, Any]) -> None:
        """Start a game.

        Args:
            name: textarena name, such as "GuessTheNumber-v0".
            seed: seed of the game's random generators.
            params: overrides of the game's default parameters.

        Raises:
            SettingsError: the game cannot start, or it needs several players, the network or missing data.
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
                self.opening = self._new_text()
                """First text of the game."""
        except Exception as error:  # games raise anything
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise SettingsError(f"textarena game {name} with seed {seed} cannot begin: {problem}") from None

    def step(self, action: str) -> str | None:
        """Apply the player's action; return the game's next text, or None at the end of the game.

        Actions without brackets are wrapped in brackets, the format that the games expect.
        """
        with self._draws():
            done, _ = self._game.step(action if "[" in action or "]" in action else f"[{action.strip()}]")
            return None if done else self._new_text()

    def reward(self) -> float:
        """Return the player's reward. Call it after the game has ended."""
        rewards, _ = self._game.close()
        return float(rewards[0])

    @contextmanager
    def _draws(self) -> Iterator[None]:
        """Install the game's random generator state for the block, then restore the previous state."""
        outside = random.getstate(), np.random.get_state()
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])
        try:
            yield
        finally:
            self._random = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])

    def _new_text(self) -> str:
        """Return the game's text since the last call."""
        from textarena import GAME_ID

        _, observation = self._game.get_observation()
        return "\n".join(text for sender, text, _ in observation if sender == GAME_ID)


async def in_game_thread(function: Any, *arguments: Any) -> Any:
    """Call a function in the game thread. Cancelling the caller does not interrupt a running function."""
    return await asyncio.get_running_loop().run_in_executor(_thread, function, *arguments)


def checked_games(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names after checking that textarena has each game.

    Raises:
        SettingsError: textarena is not installed, `names` is empty, or a name is unknown.
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

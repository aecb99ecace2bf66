"""Generates opening texts of single-player textarena games, for the environment `textarena`.

With F names, game i is played with seed `seed + i // F`. Games with equal openings may differ in hidden
state, so held-out games are distinguished by their seed.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib.metadata import version

from protocol.choices import checked_name
from protocol.errors import SettingsError
from rollout.prompts.base import GeneratedOrder, Prompt, PromptConfig, fingerprint_of
from rollout.text_games import TextGame, checked_games

HELD_OUT_SEED = 2**31
"""Offset from training seeds to held-out seeds; training indices stay below it."""


class TextArenaSource:
    """Source that cycles through games, with a new seed in each cycle. Unlimited if `count` is 0."""

    def __init__(self, config: PromptConfig) -> None:
        self._config = config
        self._games = checked_games(config.families)
        for name, params in config.params.items():
            checked_name(name, self._games, "setting prompts.params: game")
            if "seed" in params:
                raise SettingsError(f"setting prompts.params.{name}.seed: set prompts.seed instead")
        self._order = GeneratedOrder(config, HELD_OUT_SEED)
        self.size = self._order.size
        self._opening = lru_cache(maxsize=1024)(self._opened)
        for name in self._games:
            self._opening(name, config.seed)
        self.fingerprint = fingerprint_of(config, f"textarena {version('textarena')}".encode())

    def at(self, index: int) -> Prompt:
        return self._item(self._order[index], self._config.seed, index)

    def held_out(self) -> Sequence[Prompt]:
        """Return games with other seeds than the training seeds."""
        seed = self._config.seed + HELD_OUT_SEED
        return [self._item(number, seed, -1) for number in range(self._config.held_out)]

    def trained_texts(self) -> Iterable[str]:
        """Yield no text, because equal openings may belong to different games."""
        return ()

    def _item(self, number: int, seed: int, index: int) -> Prompt:
        turn, place = divmod(number, len(self._games))
        name, seed = self._games[place], seed + turn
        metadata = {"game": name, "seed": seed, "params": dict(self._config.params.get(name, {}))}
        return Prompt(self._opening(name, seed), (), metadata, index)

    def _opened(self, name: str, seed: int) -> str:
        return TextGame(name, seed, self._config.params.get(name, {})).opening

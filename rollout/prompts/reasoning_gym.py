"""Generates prompts from the task families of reasoning-gym.

Item i of a family with seed s depends only on s + i. Training uses seeds from `seed` on, and held-out prompts
use seeds from `seed + HELD_OUT_SEED` on. Items are generated in chunks, because some families generate all
items of a data set when it is created.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from protocol.choices import checked_name
from protocol.errors import SettingsError
from rollout.prompts.base import GeneratedOrder, Prompt, PromptConfig, fingerprint_of, unseen

CHUNK = 500
"""Items per created data set."""
HELD_OUT_SEED = CHUNK << 22
"""Offset from training seeds to held-out seeds; training indices stay below it."""
ATTEMPTS = 20
"""Generated candidates per requested held-out prompt before the families count as too small."""
UNSTABLE = frozenset({"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note"})
"""Families of version 0.1.25 whose items depend on the iteration order of string sets, which differs between
processes unless PYTHONHASHSEED is set."""


class ReasoningGymSource:
    """Source that cycles through F families; unlimited if `count` is 0.

    Prompt i is item i // F of family i % F.
    """

    def __init__(self, config: PromptConfig) -> None:
        self._config = config
        self._families = _checked_families(config)
        self._order = GeneratedOrder(config, HELD_OUT_SEED)
        self.size = self._order.size
        self._chunk = lru_cache(maxsize=4 * len(self._families))(self._opened)
        for family in self._families:
            self._chunk(family, config.seed)
        self.fingerprint = fingerprint_of(config, f"reasoning-gym {version('reasoning-gym')}".encode())

    def at(self, index: int) -> Prompt:
        return self._item(self._order[index], self._config.seed, index)

    def held_out(self) -> Sequence[Prompt]:
        """Return prompts with other seeds than the training seeds.

        If the training set is finite, its questions are excluded.

        Raises:
            SettingsError: the families generate too few distinct questions.
        """
        count = self._config.held_out
        trained = set(self.trained_texts()) if count else set()
        prompts: list[Prompt] = []
        for start in range(0, ATTEMPTS * count, max(1, count)):
            drawn = [
                self._item(i, self._config.seed + HELD_OUT_SEED, -1) for i in range(start, start + count)
            ]
            prompts = unseen(prompts + drawn, trained)
            if len(prompts) >= count:
                return prompts[:count]
        if count:
            raise SettingsError(
                f"families {', '.join(self._families)} gave only {len(prompts)} of {count} held-out "
                "questions that are not in training; lower prompts.held_out or prompts.count, "
                "or make the families larger with prompts.params"
            )
        return prompts

    def trained_texts(self) -> Iterable[str]:
        return (self._item(i, self._config.seed, i).text for i in range(self._config.count))

    def _item(self, number: int, seed: int, index: int) -> Prompt:
        family = self._families[number % len(self._families)]
        chunk, place = divmod(number // len(self._families), CHUNK)
        entry = self._chunk(family, seed + chunk * CHUNK)[place]
        metadata = {
            "answer": plain(entry["answer"]),
            "family": family,
            "params": dict(self._config.params.get(family, {})),
            "entry": plain(entry["metadata"]),
        }
        return Prompt(entry["question"], (), metadata, index)

    def _opened(self, family: str, seed: int) -> Any:
        import reasoning_gym

        try:
            return reasoning_gym.create_dataset(
                family, size=CHUNK, seed=seed, **self._config.params.get(family, {})
            )
        except Exception as error:  # families validate parameters with assert, and raise any exception
            raise SettingsError(
                f"setting prompts.params.{family}: {type(error).__name__}: {error}"
            ) from error


def plain(value: Any) -> Any:
    """Return `value` converted to MessagePack types.

    Tuples become `{"__tuple__": [...]}`, because some scorers distinguish tuples from lists.
    """
    if isinstance(value, Mapping):
        return {key if isinstance(key, str | int) else str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return {"__tuple__": [plain(item) for item in value]}
    if isinstance(value, list | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, bool | None):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)  # msgspec does not encode subclasses such as numpy.float64
    return plain(value.item()) if hasattr(value, "item") else str(value)


def _checked_families(config: PromptConfig) -> tuple[str, ...]:
    if config.held_out_path:
        raise SettingsError(
            "setting prompts.held_out_path: the source reasoning_gym generates its held-out prompts; "
            "set prompts.held_out"
        )
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise SettingsError(
            f"prompts.source 'reasoning_gym' needs the package reasoning-gym: {error}"
        ) from None
    if not config.families:
        raise SettingsError("setting prompts.families: name at least one task family, such as chain_sum")
    for family in config.families:
        checked_name(family, DATASETS.keys() - {"composite"}, "setting prompts.families: family")
        if family in UNSTABLE and not os.environ.get("PYTHONHASHSEED", "").isdigit():
            raise SettingsError(
                f"setting prompts.families: {family} differs between processes; "
                "set PYTHONHASHSEED=0 for all of them, or remove the family"
            )
    for family, params in config.params.items():
        checked_name(family, config.families, "setting prompts.params: family")
        for taken in {"size", "seed"} & params.keys():
            raise SettingsError(
                f"setting prompts.params.{family}.{taken}: set prompts.count and prompts.seed instead"
            )
    return config.families

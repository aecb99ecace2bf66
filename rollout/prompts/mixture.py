"""Mixes several prompt sources by weight.

The stream consists of blocks of `BLOCK` places. In every block, each source has the same number of places,
its quota. A permutation seeded by the seed and the block number assigns the places. Place i of the stream is
prompt k of source s, and (s, k) is a function of (seed, i). Processes therefore agree without communication,
in any order of access.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from protocol.errors import SettingsError
from rollout.prompts.base import Prompt, PromptConfig, PromptSource, source_settings, unseen
from rollout.prompts.named_source import SourceConfig, check_names

BLOCK = 1000
"""Places per block; shares are exact to one place."""


class MixtureSource:
    """Prompt source over other sources. It ends when the first source runs out."""

    def __init__(
        self, names: Sequence[str], quota: Sequence[int], sources: Sequence[PromptSource], seed: int
    ):
        """Mix sources.

        Args:
            quota: places per block of each source.
            seed: seed of the assignment of places.
        """
        self._names, self._sources, self._seed = names, sources, seed
        self._quota = np.array(quota)
        self._block = lru_cache(maxsize=4)(self._laid_out)
        ends = [
            end for number, source in enumerate(sources) if (end := self._end(number, source)) is not None
        ]
        self.size = min(ends, default=None)
        """Number of prompts in the stream; None if no source ends."""
        content = [
            (name, int(places), source.fingerprint)
            for name, places, source in zip(names, quota, sources, strict=True)
        ]
        self.fingerprint = xxhash.xxh3_64_hexdigest(msgspec.json.encode([BLOCK, seed, content]))

    def at(self, index: int) -> Prompt:
        if index < 0 or (self.size is not None and index >= self.size):
            raise IndexError(f"prompt {index} is outside the stream of {self.size or 'endlessly many'}")
        block, place = divmod(index, BLOCK)
        owners, ranks = self._block(block)
        number = int(owners[place])
        prompt = self._sources[number].at(block * int(self._quota[number]) + int(ranks[place]))
        return replace(self._named(prompt, number), index=index)

    def held_out(self) -> Sequence[Prompt]:
        """Return the held-out prompts of all sources, without prompts that another source trains on."""
        trained = frozenset(self.trained_texts())
        prompts = [
            self._named(prompt, number)
            for number, source in enumerate(self._sources)
            for prompt in source.held_out()
        ]
        return unseen(prompts, trained)

    def trained_texts(self) -> Iterable[str]:
        return (text for source in self._sources for text in source.trained_texts())

    def _named(self, prompt: Prompt, number: int) -> Prompt:
        return replace(prompt, metadata={**prompt.metadata, "source": self._names[number]})

    def _laid_out(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each place of a block, and the number of that source's earlier places."""
        seed = xxhash.xxh32_intdigest(f"mixture {self._seed} {block}".encode())
        numbers = np.repeat(np.arange(len(self._quota)), self._quota)
        owners = np.random.RandomState(seed).permutation(numbers)
        ranks = np.empty(BLOCK, dtype=np.int64)
        for number, places in enumerate(self._quota):
            ranks[owners == number] = np.arange(places)
        return owners, ranks

    def _end(self, number: int, source: PromptSource) -> int | None:
        """Return the first place for which a source has no prompt; None if the source is unlimited."""
        if source.size is None:
            return None
        block, rank = divmod(source.size, int(self._quota[number]))
        owners, _ = self._block(block)
        return block * BLOCK + int(np.flatnonzero(owners == number)[rank])


def make(
    config: PromptConfig, make_source: Callable[[PromptConfig, SourceConfig], PromptSource]
) -> MixtureSource:
    """Return the mixture of `config.mixture`.

    Args:
        config: section `[prompts]`.
        make_source: creates a source from its settings and its mixture entry.

    Raises:
        SettingsError: a source cannot be created, or its share is too small; the message names the source.
    """
    check_names(config.mixture, "prompts.mixture")
    if config.held_out_path:
        raise SettingsError(
            "setting prompts.held_out_path: with [[prompts.mixture]] give held-out files in [[eval.sets]]"
        )
    quota = quotas([entry.weight for entry in config.mixture])
    sources = []
    for entry, places in zip(config.mixture, quota, strict=True):
        what = f"source {entry.name} of prompts.mixture"
        if not places:
            raise SettingsError(
                f"{what}: weight {entry.weight} is less than half of {1 / BLOCK} of the sum; "
                "raise it or leave the source out"
            )
        try:
            sources.append(make_source(source_settings(config, entry), entry))
        except SettingsError as error:
            raise SettingsError(f"{what}: {error}") from None
    return MixtureSource([entry.name for entry in config.mixture], quota, sources, config.seed)


def quotas(weights: Sequence[float]) -> list[int]:
    """Return the number of places per block for each weight, by largest remainder; the sum is `BLOCK`."""
    exact = np.array(weights) / sum(weights) * BLOCK
    places = np.floor(exact).astype(int)
    remainders = np.argsort(-(exact - places), kind="stable")
    places[remainders[: BLOCK - int(places.sum())]] += 1
    return [int(count) for count in places]

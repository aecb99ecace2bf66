"""Defines verifiers: loaded ones compute call by call, awaited ones wait in many calls at once."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from reward.group import ResponseGroup, Verdict


@dataclass(slots=True)
class Notes:
    """Filled by the verifier while it scores, so that they are there even if it fails or is too slow."""

    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """What happened -> how often, or how much: `requests`, `retries`, `prompt_tokens`, `cost` ..."""
    text: str = ""
    """A judge's answer."""
    problem: str = ""
    """What went wrong last."""


class BaseVerifier:
    """Scores the responses of a group."""

    at_once: bool = False
    """Whether one call takes all samples of a group, instead of one sample."""
    by_turn: bool = False
    """Whether it scores each turn of a sample."""
    file: str = ""
    """File of the user that it comes from; empty for a verifier of tether."""


class LoadedVerifier(BaseVerifier, ABC):
    """Verifier whose calls follow each other in a worker process."""

    maps_device_memory: bool = False
    """Whether its library maps more address space than any limit allows."""

    def load(self) -> None:
        """Load what scoring needs; a worker process does so once, before its first score.

        Raises:
            SettingsError: it cannot be loaded.
        """

    @abstractmethod
    def score(self, group: ResponseGroup, samples: Sequence[int]) -> Sequence[Verdict]:
        """Return the scores of these samples. May raise anything."""


class AwaitedVerifier(BaseVerifier, ABC):
    """Verifier whose calls run at the same time, in the event loop of one process of the reward service."""

    max_running: int
    """Calls that run at once. Those beyond wait, which their time limit does not count."""

    @abstractmethod
    async def answer(self, group: ResponseGroup, samples: Sequence[int], notes: Notes) -> Sequence[Verdict]:
        """Return the scores of these samples. Cancelled when the time limit is exceeded.

        Args:
            group: prompt and responses.
            samples: numbers of the samples: one, or any number for a verifier that is `at_once`.
            notes: the verifier's notes of the call, for any outcome.

        May raise anything.
        """

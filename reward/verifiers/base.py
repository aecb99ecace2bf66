"""Defines verifier interfaces: loaded verifiers run one call at a time, awaited ones run concurrent calls."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from reward.group import ResponseGroup, Verdict


@dataclass(slots=True)
class Notes:
    """Notes of a verifier during a call. They remain available if the call fails or times out."""

    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Event or quantity -> count or amount: `requests`, `retries`, `prompt_tokens`, `cost` ..."""
    text: str = ""
    """Answer of a judge."""
    problem: str = ""
    """Most recent problem."""


class BaseVerifier:
    """Base class of verifiers, which score the responses of a group."""

    at_once: bool = False
    """Whether one call scores all samples of a group instead of one sample."""
    by_turn: bool = False
    """Whether the verifier scores each turn of a sample."""
    file: str = ""
    """User file that defines the verifier; empty for built-in verifiers."""


class LoadedVerifier(BaseVerifier, ABC):
    """Verifier with sequential calls in a worker process."""

    maps_device_memory: bool = False
    """Whether the library maps more address space than any limit allows."""

    def load(self) -> None:
        """Load models and libraries. Called once per worker process, before the first score.

        Raises:
            SettingsError: loading failed.
        """

    @abstractmethod
    def score(self, group: ResponseGroup, samples: Sequence[int]) -> Sequence[Verdict]:
        """Return the scores of `samples`. May raise any exception."""


class AwaitedVerifier(BaseVerifier, ABC):
    """Verifier with concurrent calls, in the event loop of one process of the reward service."""

    max_running: int
    """Maximum number of concurrent calls. Further calls wait; waiting does not count towards their
    timeout."""

    @abstractmethod
    async def answer(self, group: ResponseGroup, samples: Sequence[int], notes: Notes) -> Sequence[Verdict]:
        """Return the scores of `samples`. Cancelled on timeout. May raise any exception.

        Args:
            group: prompt and responses.
            samples: indices of the samples: one index, or any number for a verifier that is `at_once`.
            notes: notes of the call, kept for any outcome.
        """

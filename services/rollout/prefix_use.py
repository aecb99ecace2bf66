"""Counts how much of the prompts of model calls came from the engine's prefix cache."""

from rollout.episodes import EpisodeReport


class PrefixUse:
    """Tokens of prompts since the worker started.

    The first call of an episode can share the prompt of its group, later ones what their session has said.
    """

    def __init__(self) -> None:
        self._tokens: dict[tuple[str, str], int] = {}

    def add(self, report: EpisodeReport) -> None:
        """Count the calls of an episode that has ended, or failed."""
        for call, prompts in (("first", report.first_prompt), ("later", report.later_prompts)):
            for source, tokens in (("cache", prompts.cached), ("computed", prompts.total - prompts.cached)):
                self._tokens[call, source] = self._tokens.get((call, source), 0) + tokens

    def tokens(self) -> dict[tuple[str, str], int]:
        """Return tokens by call (`first`, `later`) and source (`cache`, `computed`)."""
        return self._tokens

    @property
    def hit_rate(self) -> float | None:
        """Share of all tokens that came from the cache; None before the first call."""
        cached = sum(tokens for (_, source), tokens in self._tokens.items() if source == "cache")
        total = sum(self._tokens.values())
        return round(cached / total, 4) if total else None

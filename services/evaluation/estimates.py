"""Estimates scores from samples: means with standard errors, pass@k, paired differences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SLACK = 1e-6
"""Tolerance below `eval.success` at which an answer still counts as correct: rewards are float32."""


@dataclass(frozen=True, slots=True)
class PromptScore:
    """Rewards of the answers to one prompt."""

    rewards: tuple[float, ...] = ()
    """[samples] reward of each answer."""
    lengths: tuple[int, ...] = ()
    """[samples] number of tokens after the prompt."""
    truncated: tuple[bool, ...] = ()
    """[samples] whether the answer was truncated at the token limit."""
    tokens: float = 0.0
    """Mean number of tokens per answer that the model sampled."""
    seconds: float = 0.0
    """Seconds until all answers to the prompt ended, including an environment's episodes."""
    error: str = ""
    """Why there are no answers; empty if there are."""

    @property
    def mean(self) -> float:
        """Mean reward."""
        return sum(self.rewards) / len(self.rewards)


def mean_and_stderr(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean and its standard error, s / sqrt(n) with s of n - 1 degrees of freedom.

    Without values the mean is None; with fewer than two, the standard error is None.
    """
    n = len(values)
    if not n:
        return None, None
    mean = math.fsum(values) / n
    if n == 1:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return the unbiased estimate of the probability that one of k answers is correct.

    1 - C(n - c, k) / C(n, k) for c correct answers of n (Chen et al. 2021, arXiv 2107.03374, equation 1), in
    exact integers. k is at most n.
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def paired_difference(after: Sequence[float], before: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean of after - before over the same prompts, and its standard error."""
    mean, stderr = mean_and_stderr([a - b for a, b in zip(after, before, strict=True)])
    return mean or 0.0, stderr


def greedy_fields(scores: Sequence[PromptScore]) -> dict[str, Any]:
    """Return the fields of `Evaluation` for the greedy answers."""
    scored = [score for score in scores if not score.error]
    mean, stderr = mean_and_stderr([score.mean for score in scored])
    return {
        "greedy": mean,
        "greedy_stderr": stderr,
        "length": _mean_of([length for score in scored for length in score.lengths]),
        "truncated": _mean_of([ended for score in scored for ended in score.truncated]),
        "tokens": _mean_of([score.tokens for score in scored]),
        "prompt_s": _mean_of([score.seconds for score in scored]),
    }


def sampled_fields(scores: Sequence[PromptScore], ks: Sequence[int], success: float) -> dict[str, Any]:
    """Return the fields of `Evaluation` for the sampled answers.

    Answers to one prompt are not independent, so the standard error is computed over the prompts' means
    (Miller 2024, arXiv 2411.00640, clustered by prompt).

    Args:
        scores: scores of each prompt.
        ks: values of k for pass@k.
        success: minimum reward of a correct answer.
    """
    scored = [score for score in scores if not score.error]
    mean, stderr = mean_and_stderr([score.mean for score in scored])
    at_k = (
        {k: mean_and_stderr([_pass_at(score, k, success) for score in scored]) for k in ks} if scored else {}
    )
    return {
        "sampled": mean,
        "sampled_stderr": stderr,
        "pass_at_k": {k: value for k, (value, _) in at_k.items() if value is not None},
        "pass_at_k_stderr": {k: error for k, (_, error) in at_k.items()},
        "sampled_length": _mean_of([length for score in scored for length in score.lengths]),
        "sampled_truncated": _mean_of([ended for score in scored for ended in score.truncated]),
        "sampled_tokens": _mean_of([score.tokens for score in scored]),
        "sampled_prompt_s": _mean_of([score.seconds for score in scored]),
    }


def _pass_at(score: PromptScore, k: int, success: float) -> float:
    right = sum(reward >= success - SLACK for reward in score.rewards)
    return pass_at_k(len(score.rewards), right, k)


def _mean_of(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

"""Defines section `[reward]`."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Interval

from protocol.paths import basic_setting


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """One entry of `reward.verifiers`."""

    name: str = "exact_match"
    """Name of a verifier in `reward/verifiers/`; `function` calls a function of your own. With a dot: a
    module of your own with the same interface."""
    weight: Annotated[float, Interval(ge=-1e6, le=1e6)] = 1.0
    """Factor of this verifier's score in the reward."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the verifier."""
    label: str = ""
    """Name of the verifier's scores in messages and metrics. Empty: `name`. Required if a verifier is used
    twice."""
    fallback: str = ""
    """Name (or label) of another verifier, whose score replaces this verifier's score on failure. The
    fallback verifier is not called otherwise, and its weight is ignored."""

    @property
    def component(self) -> str:
        """Name of the verifier's scores."""
        return self.label or self.name


@dataclass(frozen=True, slots=True)
class RewardConfig:
    """Section `[reward]`. The reward of a sample is the weighted sum of its scores."""

    verifiers: tuple[VerifierConfig, ...] = basic_setting((VerifierConfig(),))
    """Verifiers that score each sample. May be empty if the environment returns the reward."""
    environment_weight: Annotated[float, Interval(ge=-1e6, le=1e6)] = 1.0
    """Factor of the environment's reward."""
    timeout_s: Annotated[float, Interval(gt=0, le=1e6)] = 30.0
    """Time limit of one verifier for one response (for functions that score whole groups: one group),
    seconds. A worker process that exceeds the limit is replaced. Calls of judges and asynchronous functions
    are cancelled."""
    timeout_score: Annotated[float | None, Interval(ge=-1e6, le=1e6)] = None
    """Score of a response on which a verifier exceeded `timeout_s` on two workers. Unset: the group gets no
    score, and is dropped after `bound.max_attempts`."""
    start_timeout_s: Annotated[float, Interval(gt=0, le=1e6)] = 120.0
    """Time limit for a worker process to import its verifiers and load their models, seconds."""
    workers: Annotated[int, Interval(ge=1, le=10_000)] = basic_setting(2)
    """Number of worker processes, which share the samples of all groups. Judges and asynchronous functions
    run concurrently in one additional process."""
    memory_mb: Annotated[int, Interval(ge=0, le=10**9)] = 4096
    """Address space limit of a worker process, in addition to the models it loads, MiB. 0: no limit, as
    verifiers on a GPU require."""

    @property
    def may_score_turns(self) -> bool:
        """Whether a verifier may score turns.

        Only a user's function can; whether it does is known after import.
        """
        return any(verifier.name == "function" for verifier in self.verifiers)


def can_score_again(config: RewardConfig) -> bool:
    """Return whether a second scoring is cheap and returns the same scores.

    A judge's answers cost money and may differ. A reward model is loaded by each worker.
    """
    return not any("judge" in one.name or "reward_model" in one.name for one in config.verifiers)


def runs_code(config: RewardConfig) -> bool:
    """Return whether verifiers execute text of the model; unknown, and so False, for the user's own code.

    `python_tests` runs programs within a time limit. Scorers of reasoning-gym evaluate answers.
    """
    return any("python_tests" in one.name or "reasoning_gym" in one.name for one in config.verifiers)

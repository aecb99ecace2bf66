"""Defines section `[reward]`."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Interval

from protocol.paths import set_first


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """One entry of `reward.verifiers`."""

    name: str = "exact_match"
    """A verifier in `reward/verifiers/`: `function` calls a function of your own. With a dot: a module of
    your own with the same interface."""
    weight: Annotated[float, Interval(ge=-1e6, le=1e6)] = 1.0
    """Factor of this verifier's score in the reward."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of that verifier."""
    label: str = ""
    """Name of its scores in messages and metrics. Empty: `name`. Needed where a verifier is used twice."""
    fallback: str = ""
    """Name (its label, if it has one) of another verifier, whose score is taken for this one's where this one
    fails. That verifier is not called otherwise, and its weight does not count."""

    @property
    def component(self) -> str:
        """Name of its scores."""
        return self.label or self.name


@dataclass(frozen=True, slots=True)
class RewardConfig:
    """Section `[reward]`. The reward of a sample is the weighted sum of its scores."""

    verifiers: tuple[VerifierConfig, ...] = set_first((VerifierConfig(),))
    """The verifiers that score a sample. May be empty where the environment itself gives the reward."""
    environment_weight: Annotated[float, Interval(ge=-1e6, le=1e6)] = 1.0
    """Factor of the environment's own reward, if it gives one."""
    timeout_s: Annotated[float, Interval(gt=0, le=1e6)] = 30.0
    """Limit for one verifier on one response (of a function that scores whole groups: on one group), seconds.
    The worker process that exceeds it is replaced; of a judge or an asynchronous function the call ends."""
    timeout_score: Annotated[float | None, Interval(ge=-1e6, le=1e6)] = None
    """Score of a response on which a verifier exceeded `timeout_s` on two workers. Unset: its group has no
    score, and is dropped after `bound.max_attempts`."""
    start_timeout_s: Annotated[float, Interval(gt=0, le=1e6)] = 120.0
    """Limit for a worker process to import its verifiers and load their models, seconds."""
    workers: Annotated[int, Interval(ge=1, le=10_000)] = set_first(2)
    """Worker processes, over which the samples of all groups are divided. Judges and asynchronous functions
    share one more, in which calls for all samples wait at the same time."""
    memory_mb: Annotated[int, Interval(ge=0, le=10**9)] = 4096
    """Address space of a worker process in addition to the models that it loads, MiB. 0: no limit, which a
    verifier on a GPU needs."""

    @property
    def may_score_turns(self) -> bool:
        """Whether a verifier may score turns: functions of the user do, as is known once one is imported."""
        return any(verifier.name == "function" for verifier in self.verifiers)


def can_score_again(config: RewardConfig) -> bool:
    """Return whether a second call is cheap and gives the same.

    A judge's answers cost money, and need not be the same; a reward model is loaded by each worker.
    """
    return not any("judge" in one.name or "reward_model" in one.name for one in config.verifiers)


def runs_code(config: RewardConfig) -> bool:
    """Return whether verifiers execute text of the model; of the user's own code it is not known.

    `python_tests` runs programs, within a time limit of its own; scorers of reasoning-gym evaluate answers.
    """
    return any("python_tests" in one.name or "reasoning_gym" in one.name for one in config.verifiers)

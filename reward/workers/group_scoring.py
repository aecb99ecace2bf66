"""Scores one group: runs its verifier calls concurrently, with retries and fallbacks."""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from protocol.errors import TetherError
from protocol.messages import Remark
from reward.combine import VerifierError
from reward.config import RewardConfig
from reward.turns import GroupTurns, TurnScores
from reward.workers.frames import CallOutcome, VerifierTraits

TIMED_OUT = "timed_out"
"""Component that counts, per sample, the verifiers with `timeout_score`; missing if all counts are 0. Its
weight is 0."""
FELL_BACK = "fell_back"
"""Component that counts, per sample, the verifiers whose score is from a fallback; missing if all counts are
0. Its weight is 0."""
log = logging.getLogger("tether.reward")


class CallVerifier(Protocol):
    """Function that calls a verifier on samples of the group, in a worker process."""

    async def __call__(
        self, verifier: int, samples: Sequence[int], is_over: Callable[[], bool]
    ) -> CallOutcome | None:
        """Return the outcome; None if `is_over` returned True before the call began."""


@dataclass(frozen=True, slots=True)
class VerifierScores:
    """Scores of a group by its verifiers. Shapes: n samples; K_i turns of sample i."""

    components: dict[str, list[float]]
    """Verifier -> [n] scores, for turns their sums; includes `TIMED_OUT` and `FELL_BACK`."""
    turns: dict[str, list[list[float]]]
    """Verifiers that scored turns -> [n][K_i] scores."""
    remarks: Sequence[Remark]
    """Answers of judges."""


class GroupScoring:
    """Verifier calls for one group."""

    def __init__(
        self,
        config: RewardConfig,
        traits: Sequence[VerifierTraits],
        turns: GroupTurns,
        call: CallVerifier,
        count: Callable[[int, str, float], None],
    ) -> None:
        """Prepare the calls. `run` starts them.

        Args:
            config: section `[reward]`.
            traits: traits of each verifier.
            turns: turns of the group.
            call: calls a verifier.
            count: counts an event of a verifier.
        """
        n = len(turns.counts)
        self._config, self._traits, self._turns, self._n = config, traits, turns, n
        self._call, self._count = call, count
        self._names = [verifier.component for verifier in config.verifiers]
        self._scores = {i: [0.0] * n for i in primaries(config)}
        self._turn_scores = TurnScores(turns.counts)
        self._given_up, self._fell_back = [0.0] * n, [0.0] * n
        self._fallback_errors: dict[int, VerifierError] = {}
        """Verifier -> its first error that led to a fallback."""
        self._waiting: list[asyncio.Task[None]] = []
        self._failures: list[tuple[int, int, TetherError]] = []
        self._remarks: list[Remark] = []

    async def run(self) -> VerifierScores:
        """Return the scores and the judges' remarks.

        Calls run concurrently. After a failure, no further calls start and awaited calls are cancelled. Other
        calls run to their end, because cancelling a call would end its process.

        Raises:
            VerifierError: a verifier without fallback failed, or timed out without `timeout_score`. Of
                several failures, the error is from the first verifier and sample.
        """
        async with asyncio.TaskGroup() as tasks:
            for target in self._scores:
                for samples in self._parts(target, range(self._n)):
                    task = tasks.create_task(
                        self._score_or_fail(target, samples), name=f"{self._names[target]}-{samples[0]}"
                    )
                    if self._traits[target].awaits:
                        self._waiting.append(task)
        for verifier, error in self._fallback_errors.items():
            to = self._config.verifiers[verifier].fallback
            log.warning("score.fell_back verifier=%s to=%s error=%s", error.verifier, to, error.error)
        if self._failures:
            raise min(self._failures, key=lambda failure: failure[:2])[2]
        extra = {TIMED_OUT: self._given_up, FELL_BACK: self._fell_back}
        components = {self._names[target]: scores for target, scores in self._scores.items()}
        turns = self._turn_scores.filled(components)
        components |= {name: counts for name, counts in extra.items() if any(counts)}
        return VerifierScores(components, turns, self._remarks)

    def _parts(self, verifier: int, samples: Sequence[int]) -> list[list[int]]:
        """Return the samples of each call that a verifier requires."""
        return [list(samples)] if self._traits[verifier].at_once else [[i] for i in samples]

    async def _score_or_fail(self, target: int, samples: Sequence[int]) -> None:
        try:
            await self._score(target, target, samples)
        except TetherError as error:
            self._failures.append((target, samples[0], error))
            for task in self._waiting:
                if task is not asyncio.current_task():
                    task.cancel()

    async def _score(self, target: int, verifier: int, samples: Sequence[int]) -> None:
        """Record the scores of samples for verifier `target`, from `verifier` or its fallbacks.

        Raises:
            TetherError: there is no score.
        """
        try:
            timed_out, problem = await self._attempt(target, verifier, samples)
            if not timed_out:
                return
            limit = self._config.timeout_s
            error = VerifierError(
                self._names[verifier],
                f"no score for sample {timed_out[0]} within reward.timeout_s {limit}{problem}",
            )
            unscored = timed_out
        except VerifierError as raised:
            timed_out, unscored, error = [], samples, raised
        fallback = self._config.verifiers[verifier].fallback
        if fallback:
            self._fallback_errors.setdefault(verifier, error)
            self._count(verifier, "fallbacks", len(unscored))
            for i in unscored:
                self._fell_back[i] += 1.0
            other = self._names.index(fallback)
            for part in self._parts(other, unscored):
                await self._score(target, other, part)
        elif timed_out and self._config.timeout_score is not None:
            for i in timed_out:
                self._scores[target][i] = self._config.timeout_score
                self._given_up[i] += 1.0
        else:
            raise error

    async def _attempt(self, target: int, verifier: int, samples: Sequence[int]) -> tuple[Sequence[int], str]:
        """Record the scores of a verifier; return the samples that timed out, and the last problem.

        With `timeout_score`, samples that time out are retried once, in another process or at another time.

        Raises:
            TetherError: the verifier failed.
        """
        unscored, problem = samples, ""
        if self._traits[verifier].by_turn:
            self._turns.check_texts(self._names[verifier])
        for _ in range(1 if self._config.timeout_score is None else 2):
            answer = await self._call(verifier, unscored, lambda: bool(self._failures))
            if answer is None:
                return [], ""
            if answer.error:
                raise VerifierError(self._names[verifier], answer.error)
            self._note(verifier, unscored, answer)
            for i, score in zip(unscored, answer.scores, strict=True):
                if score is not None:
                    self._scores[target][i] = self._score_of(target, verifier, i, score)
            unscored = [i for i, score in zip(unscored, answer.scores, strict=True) if score is None]
            problem = f"; {answer.problem}" if answer.problem else ""
            if not unscored:
                break
        return unscored, problem

    def _score_of(self, target: int, verifier: int, sample: int, score: float | list[float]) -> float:
        """Return a sample's score for verifier `target`: for scored turns, the sum. Record turn scores.

        Raises:
            VerifierError: the score is not finite, or turns are scored and it is not one score per turn.
        """
        name = self._names[verifier]
        if isinstance(score, list) != self._traits[verifier].by_turn:
            raise VerifierError(name, f"scored sample {sample} as {type(score).__name__}")
        if isinstance(score, list):
            return self._turn_scores.note(self._names[target], sample, score, by=name)
        if not math.isfinite(score):
            raise VerifierError(name, f"scored sample {sample} as {score}")
        self._turn_scores.forget(self._names[target], sample)
        return score

    def _note(self, verifier: int, samples: Sequence[int], answer: CallOutcome) -> None:
        if answer.text and None not in answer.scores:
            counts = answer.counts
            self._remarks.append(
                Remark(
                    verifier=self._names[verifier],
                    sample=-1 if self._traits[verifier].at_once else samples[0],
                    text=answer.text,
                    prompt_tokens=int(counts.get("prompt_tokens", 0)),
                    completion_tokens=int(counts.get("completion_tokens", 0)),
                    cost=counts.get("cost", 0.0),
                    is_cached=bool(counts.get("cache_hits")),
                )
            )


def primaries(config: RewardConfig) -> list[int]:
    """Return the indices of the verifiers that score every sample, i.e. all except fallbacks."""
    fallbacks = {verifier.fallback for verifier in config.verifiers}
    return [i for i, item in enumerate(config.verifiers) if item.component not in fallbacks]


def check_fallbacks(verifiers: Mapping[str, str]) -> str:
    """Return the problem with fallbacks (verifier -> fallback or ""), or an empty string."""
    for name, fallback in verifiers.items():
        if fallback and fallback not in verifiers:
            return f"{name}: there is no verifier {fallback!r} to fall back to"
        seen = {name}
        while fallback:
            if fallback in seen:
                return f"{name}: its fallbacks lead back to {fallback!r}"
            seen.add(fallback)
            fallback = verifiers.get(fallback, "")
    return ""

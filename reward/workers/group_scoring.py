"""Scores one group: its calls to verifiers run at once, and are tried again or handed to a fallback."""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from protocol.errors import TetherError
from protocol.messages import Remark
from reward.combine import VerifierError
from reward.config import RewardConfig
from reward.turns import GroupTurns
from reward.workers.outcome import CallOutcome, GroupFrame

TIMED_OUT = "timed_out"
"""Name of the component that counts, for each sample, the verifiers of which it got `timeout_score`. It is
there only if there are such samples. Its weight is 0."""
FELL_BACK = "fell_back"
"""Likewise, of the verifiers whose score another one gave."""
log = logging.getLogger("tether.reward")


class Verifiers(Protocol):
    """Calls verifiers in worker processes."""

    def at_once(self, verifier: int) -> bool:
        """Return whether one call takes all samples of a group."""

    def by_turn(self, verifier: int) -> bool:
        """Return whether it scores each turn of a sample."""

    def awaits(self, verifier: int) -> bool:
        """Return whether calls of it wait for something, so that cancelling one costs no process."""

    async def call(
        self, verifier: int, group: GroupFrame, samples: Sequence[int], scoring: "GroupScoring"
    ) -> CallOutcome | None:
        """Return the outcome of a call; None if `scoring` was over before it began."""

    def count(self, verifier: int, what: str, amount: float = 1.0) -> None:
        """Count what happened."""


class GroupScoring:
    """The calls for one group."""

    def __init__(
        self, verifiers: Verifiers, config: RewardConfig, group: GroupFrame, turns: GroupTurns
    ) -> None:
        """Begin nothing yet. `turns` are those of the group, which keeps their scores."""
        n = len(turns.counts)
        self._verifiers, self._config, self._group, self._n = verifiers, config, group, n
        self._turns = turns
        self._names = [verifier.component for verifier in config.verifiers]
        self._scores = {i: [0.0] * n for i in primaries(config)}
        self._given_up, self._fell_back = [0.0] * n, [0.0] * n
        self._fallback_errors: dict[int, VerifierError] = {}
        """Verifier -> its first error for which another one was asked."""
        self._waiting: list[asyncio.Task[None]] = []
        self._failures: list[tuple[int, int, TetherError]] = []
        self.remarks: list[Remark] = []

    @property
    def is_over(self) -> bool:
        """Whether a score cannot be computed, so that no further call makes sense."""
        return bool(self._failures)

    async def run(self) -> dict[str, list[float]]:
        """Return component -> [n] scores.

        Calls run in any order and at once. After a failure none is begun; those that wait are cancelled, and
        others end by themselves, since cancelling one would cost its process.

        Raises:
            VerifierError: a verifier failed, or was late and there is no `timeout_score`, and it has no
                fallback; of several failures the one of the first verifier and sample.
        """
        async with asyncio.TaskGroup() as tasks:
            for target in self._scores:
                for samples in self._calls(target, range(self._n)):
                    task = tasks.create_task(
                        self._score_or_fail(target, samples), name=f"{self._names[target]}-{samples[0]}"
                    )
                    if self._verifiers.awaits(target):
                        self._waiting.append(task)
        for verifier, error in self._fallback_errors.items():
            to = self._config.verifiers[verifier].fallback
            log.warning("score.fell_back verifier=%s to=%s error=%s", error.verifier, to, error.error)
        if self._failures:
            raise min(self._failures, key=lambda failure: failure[:2])[2]
        extra = {TIMED_OUT: self._given_up, FELL_BACK: self._fell_back}
        return {self._names[target]: scores for target, scores in self._scores.items()} | {
            name: counts for name, counts in extra.items() if any(counts)
        }

    def _calls(self, verifier: int, samples: Sequence[int]) -> list[list[int]]:
        """Return the samples of each call that a verifier needs."""
        return [list(samples)] if self._verifiers.at_once(verifier) else [[i] for i in samples]

    async def _score_or_fail(self, target: int, samples: Sequence[int]) -> None:
        try:
            await self._score(target, target, samples)
        except TetherError as error:
            self._failures.append((target, samples[0], error))
            for task in self._waiting:
                if task is not asyncio.current_task():
                    task.cancel()

    async def _score(self, target: int, verifier: int, samples: Sequence[int]) -> None:
        """Note the scores of some samples as those of verifier `target`, given by it or by a fallback.

        Raises:
            TetherError: there is none.
        """
        try:
            late, problem = await self._tried(target, verifier, samples)
            if not late:
                return
            limit = self._config.timeout_s
            error = VerifierError(
                self._names[verifier],
                f"no score for sample {late[0]} within reward.timeout_s {limit}{problem}",
            )
            failed = late
        except VerifierError as raised:
            late, failed, error = [], samples, raised
        fallback = self._config.verifiers[verifier].fallback
        if fallback:
            self._fallback_errors.setdefault(verifier, error)
            self._verifiers.count(verifier, "fallbacks", len(failed))
            for i in failed:
                self._fell_back[i] += 1.0
            other = self._names.index(fallback)
            for part in self._calls(other, failed):
                await self._score(target, other, part)
        elif late and self._config.timeout_score is not None:
            for i in late:
                self._scores[target][i] = self._config.timeout_score
                self._given_up[i] += 1.0
        else:
            raise error

    async def _tried(self, target: int, verifier: int, samples: Sequence[int]) -> tuple[Sequence[int], str]:
        """Note the scores that a verifier gives; return the samples that are late, and what went wrong.

        With `timeout_score`, late ones are tried once more, in another process or at another time.

        Raises:
            TetherError: the verifier failed.
        """
        late, problem = samples, ""
        if self._verifiers.by_turn(verifier):
            self._turns.check_texts(self._names[verifier])
        for _ in range(1 if self._config.timeout_score is None else 2):
            answer = await self._verifiers.call(verifier, self._group, late, self)
            if answer is None:
                return [], ""
            if answer.error:
                raise VerifierError(self._names[verifier], answer.error)
            self._note(verifier, late, answer)
            for i, score in zip(late, answer.scores, strict=True):
                if score is not None:
                    self._scores[target][i] = self._score_of(target, verifier, i, score)
            late = [i for i, score in zip(late, answer.scores, strict=True) if score is None]
            problem = f"; {answer.problem}" if answer.problem else ""
            if not late:
                break
        return late, problem

    def _score_of(self, target: int, verifier: int, sample: int, given: float | list[float]) -> float:
        """Return what a sample was given as verifier `target`, of its turns the sum, whose scores are kept.

        Raises:
            VerifierError: it is not finite, or not one score for each turn where turns are scored.
        """
        name = self._names[verifier]
        if isinstance(given, list) != self._verifiers.by_turn(verifier):
            raise VerifierError(name, f"scored sample {sample} as {type(given).__name__}")
        if isinstance(given, list):
            return self._turns.note(self._names[target], sample, given, by=name)
        if not math.isfinite(given):
            raise VerifierError(name, f"scored sample {sample} as {given}")
        self._turns.forget(self._names[target], sample)
        return given

    def _note(self, verifier: int, samples: Sequence[int], answer: CallOutcome) -> None:
        if answer.text and None not in answer.scores:
            counts = answer.counts
            self.remarks.append(
                Remark(
                    verifier=self._names[verifier],
                    sample=-1 if self._verifiers.at_once(verifier) else samples[0],
                    text=answer.text,
                    prompt_tokens=int(counts.get("prompt_tokens", 0)),
                    completion_tokens=int(counts.get("completion_tokens", 0)),
                    cost=counts.get("cost", 0.0),
                    is_cached=bool(counts.get("cache_hits")),
                )
            )


def primaries(config: RewardConfig) -> list[int]:
    """Return the numbers of the verifiers that score every sample: all but fallbacks."""
    fallbacks = {verifier.fallback for verifier in config.verifiers}
    return [i for i, item in enumerate(config.verifiers) if item.component not in fallbacks]


def check_fallbacks(verifiers: Mapping[str, str]) -> str:
    """Return what is wrong with fallbacks, verifier -> its fallback or ""; empty if nothing is."""
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

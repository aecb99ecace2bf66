"""Runs verifiers in a pool of worker processes: one that hangs or crashes costs one process and one score."""

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec

from protocol.errors import RewardError, SettingsError
from protocol.messages import Remark
from protocol.ranges import check_ranges
from reward.combine import combine
from reward.config import RewardConfig
from reward.turns import GroupTurns
from reward.verifiers.registry import find_verifier
from reward.workers.client import WorkerClient
from reward.workers.group_scoring import FELL_BACK, TIMED_OUT, GroupScoring, check_fallbacks
from reward.workers.outcome import CallOutcome, GroupFrame
from reward.workers.waiting import WaitingProcesses

ENVIRONMENT = "environment"
"""Name of the component with the environment's reward."""
OWN = (ENVIRONMENT, TIMED_OUT, FELL_BACK)
"""Names of components that are not of a verifier."""
CLOSED = "the score pool is closed"


class ScorePool:
    """Pool of `config.workers` processes that score one sample each at a time, and one in which calls wait.

    An async context manager.
    """

    def __init__(self, config: RewardConfig, modules: Sequence[str] = ()) -> None:
        """Check the section.

        Args:
            config: the section.
            modules: directories with modules of the user, for the workers.

        Raises:
            SettingsError: a verifier is unknown, two have one name, or a number is out of range.
        """
        check_ranges(config, "reward")
        for verifier in config.verifiers:
            find_verifier(verifier.name)
        names = [verifier.component for verifier in config.verifiers]
        if len({*names, *OWN}) != len(names) + len(OWN):
            raise SettingsError(
                f"setting reward.verifiers: {', '.join(names)}: each needs a name of its own, "
                f"other than {', '.join(map(repr, OWN))}; give a `label`"
            )
        if wrong := check_fallbacks({item.component: item.fallback for item in config.verifiers}):
            raise SettingsError(f"setting reward.verifiers: {wrong}")
        self._config, self._modules = config, tuple(modules)
        self._weights = {verifier.component: verifier.weight for verifier in config.verifiers} | {
            ENVIRONMENT: config.environment_weight,
            TIMED_OUT: 0.0,
            FELL_BACK: 0.0,
        }
        self.counts: dict[tuple[str, str], float] = defaultdict(float)
        """(verifier, what happened) -> how often, or how much."""
        self._at_once: Sequence[bool] = ()
        self._awaits: Sequence[bool] = ()
        self._by_turn: Sequence[bool] = ()
        self._waiting = WaitingProcesses(config, self._modules)
        self._numbers = itertools.count()
        self._slots: asyncio.Queue[WorkerClient | None] = asyncio.Queue()
        """One entry per free slot: its worker, or None if that has to be started. Every taker puts one
        back."""
        for _ in range(config.workers):
            self._slots.put_nowait(None)
        self._running: set[WorkerClient] = set()
        self._closed = False

    async def __aenter__(self) -> "ScorePool":
        """Start one worker, which checks options and imports; the others start on demand.

        Raises:
            SettingsError, RewardError: it does not start.
        """
        if self._config.verifiers:
            await self._learn()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def score(
        self,
        prompt_text: str,
        responses: Sequence[str],
        metadata: bytes | msgspec.Raw | Mapping[str, Any],
        environment: Sequence[float] | None = None,
        token_counts: Sequence[int] | None = None,
        finish_reasons: Sequence[str] | None = None,
        remarks: list[Remark] | None = None,
        turns: GroupTurns | None = None,
    ) -> tuple[list[float], dict[str, list[float]]]:
        """Score a group; its samples wait for free workers, behind those of groups that came before.

        Cancelling it replaces workers that score its samples.

        Args:
            prompt_text: the prompt as text.
            responses: [n] the samples as text.
            metadata: a MessagePack map, or a mapping to encode as one.
            environment: [n] rewards of the environment, which are one more component.
            token_counts: [n] tokens of the samples; by default 0.
            finish_reasons: [n] why they ended; by default "stop".
            remarks: what judges said is appended to it.
            turns: those of the samples, by default one each; their scores are kept in it.

        Returns:
            [n] combined rewards, and component -> [n] scores.

        Raises:
            RewardError: a score could not be computed; a `VerifierError` names the verifier.
        """
        components: dict[str, list[float]] = {}
        n = len(responses)
        turns = turns or GroupTurns([1] * n, [[text] for text in responses], [[""]] * n)
        if self._config.verifiers:
            counts, reasons = token_counts or [0] * n, finish_reasons or ["stop"] * n
            await self._learn()
            of_turns = (turns.texts or [], turns.contexts or []) if self.scores_turns else ([], [])
            frame = _group_frame(
                prompt_text, list(responses), metadata, list(counts), list(reasons), *of_turns
            )
            components, said = await self._score(frame, turns)
            if remarks is not None:
                remarks.extend(said)
        if environment is not None:
            components[ENVIRONMENT] = list(environment)
        rewards = combine(components, self._weights)
        turns.combine(components, self._weights)
        return rewards, components

    async def _score(
        self, frame: bytes, turns: GroupTurns
    ) -> tuple[dict[str, list[float]], Sequence[Remark]]:
        """Return component -> [n] scores of a group, and what judges said."""
        group = GroupFrame(next(self._numbers), frame)
        scoring = GroupScoring(self, self._config, group, turns)
        try:
            return await scoring.run(), scoring.remarks
        finally:
            self._waiting.forget(group)

    @property
    def scores_turns(self) -> bool:
        """Whether a verifier scores turns; known once the pool was entered."""
        return any(self._by_turn)

    def by_turn(self, verifier: int) -> bool:
        """Return whether a verifier scores each turn of a sample."""
        return self._by_turn[verifier]

    def at_once(self, verifier: int) -> bool:
        """Return whether one call of a verifier takes all samples of a group."""
        return self._at_once[verifier]

    def awaits(self, verifier: int) -> bool:
        """Return whether a verifier waits, many calls at a time."""
        return self._awaits[verifier]

    def count(self, verifier: int, what: str, amount: float = 1.0) -> None:
        """Count what happened to a verifier."""
        self.counts[self._config.verifiers[verifier].component, what] += amount

    async def call(
        self, verifier: int, group: GroupFrame, samples: Sequence[int], scoring: GroupScoring
    ) -> CallOutcome | None:
        """Return the outcome of a call; None if `scoring` was over before it began.

        Raises:
            RewardError: the pool is closed, or a process does not start.
        """
        began = time.monotonic()
        if self._awaits[verifier]:
            if self._closed:
                raise RewardError(CLOSED)
            answer = await self._waiting.call(group, verifier, samples)
        else:
            async with self._worker() as worker:
                if scoring.is_over:
                    return None
                began = time.monotonic()
                answer = await worker.call(group, verifier, samples)
        self.count(verifier, "calls")
        self.count(verifier, "seconds", time.monotonic() - began)
        self.count(verifier, "failures", bool(answer.error))
        self.count(verifier, "late", answer.scores.count(None))
        for what, amount in answer.counts.items():
            self.count(verifier, what, amount)
        return answer

    async def _learn(self) -> None:
        """Learn from a worker, which has imported the verifiers, how each is to be called."""
        if not self._at_once:
            async with self._worker() as worker:
                self._at_once, self._awaits = worker.at_once, worker.awaits
                self._by_turn = worker.by_turn
                self._waiting.awaited = [i for i, awaits in enumerate(self._awaits) if awaits]

    async def close(self) -> None:
        """End all workers; groups that are being scored fail. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._waiting.close()
        for worker in self._running:
            worker.kill()
        for _ in range(self._config.workers):
            idle = await self._slots.get()
            if idle is not None:
                await self._end(idle)

    @contextlib.asynccontextmanager
    async def _worker(self) -> AsyncIterator[WorkerClient]:
        """Take a worker for one call; one that is not healthy afterwards is ended, and later replaced."""
        worker: WorkerClient | None = await self._slots.get()
        try:
            if self._closed:
                raise RewardError(CLOSED)
            if worker is None:
                worker = await WorkerClient.start(self._config, self._modules)
                self._running.add(worker)
            yield worker
        finally:
            try:
                if worker is not None and (self._closed or not worker.healthy):
                    ending, worker = worker, None
                    await self._end(ending)
            finally:
                self._slots.put_nowait(worker)

    async def _end(self, worker: WorkerClient) -> None:
        self._running.discard(worker)
        await worker.end()


def _group_frame(
    prompt_text: str,
    responses: list[str],
    metadata: bytes | msgspec.Raw | Mapping[str, Any],
    *rest: Sequence[Any],
) -> bytes:
    """Return the frame that describes a group to a worker. Raises RewardError if a text is none."""
    try:
        packed = msgspec.msgpack.encode(dict(metadata)) if isinstance(metadata, Mapping) else bytes(metadata)
        return msgspec.msgpack.encode(["group", prompt_text, responses, packed, *rest])
    except UnicodeEncodeError as error:
        raise RewardError(f"prompt, response or metadata is no valid text: {error}") from None

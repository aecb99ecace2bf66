"""Runs verifiers in a pool of worker processes. A hang or crash costs one process and one score."""

import asyncio
import contextlib
import functools
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgspec

from protocol.errors import RewardError, SettingsError
from protocol.messages import Remark
from reward.combine import combine
from reward.config import RewardConfig
from reward.turns import GroupTurns, combine_turns
from reward.verifiers.registry import find_verifier
from reward.workers.client import WorkerClient, WorkerEnded
from reward.workers.frames import CallOutcome, GroupFrame, VerifierTraits
from reward.workers.group_scoring import (
    FELL_BACK,
    TIMED_OUT,
    GroupScoring,
    VerifierScores,
    check_fallbacks,
)
from reward.workers.slots import SharedSlots, WorkerSlot

ENVIRONMENT = "environment"
"""Component with the environment's reward."""
OWN = (ENVIRONMENT, TIMED_OUT, FELL_BACK)
"""Components that are not from a verifier."""


@dataclass(frozen=True, slots=True)
class GroupScores:
    """Scores of a group. Shapes: n samples; K_i turns of sample i."""

    rewards: Sequence[float]
    """[n] combined rewards."""
    components: Mapping[str, Sequence[float]]
    """Component -> [n] scores."""
    turn_rewards: Sequence[Sequence[float]]
    """[n][K_i] combined rewards; empty if no verifier scored turns."""
    turn_components: Mapping[str, Sequence[Sequence[float]]]
    """Verifiers that scored turns -> [n][K_i] scores before weighting."""
    remarks: Sequence[Remark]
    """Answers of judges."""


class ScorePool:
    """Pool of `config.workers` processes with one call at a time, and one process with concurrent calls.

    An async context manager.
    """

    def __init__(
        self, config: RewardConfig, modules: Sequence[str] = (), withheld: Collection[str] = ()
    ) -> None:
        """Validate the settings.

        Args:
            config: section `[reward]`.
            modules: directories of user modules, for the workers.
            withheld: environment variables that the workers do not inherit.

        Raises:
            SettingsError: a verifier is unknown, or two verifiers have the same name.
        """
        for verifier in config.verifiers:
            find_verifier(verifier.name)
        check_names(config)
        self._config, self._modules, self._withheld = config, tuple(modules), frozenset(withheld)
        self._weights = {verifier.component: verifier.weight for verifier in config.verifiers} | {
            ENVIRONMENT: config.environment_weight,
            TIMED_OUT: 0.0,
            FELL_BACK: 0.0,
        }
        self.counts: dict[tuple[str, str], float] = defaultdict(float)
        """(verifier, event) -> count or amount."""
        self._traits: Sequence[VerifierTraits] = ()
        self._numbers = itertools.count()
        slots = [
            WorkerSlot(config, self._modules, config.verifiers, is_concurrent=False, withheld=self._withheld)
            for _ in range(config.workers)
        ]
        self._free: asyncio.Queue[WorkerSlot] = asyncio.Queue()
        """Slots without a call. Every user of a slot must put it back."""
        for slot in slots:
            self._free.put_nowait(slot)
        self._shared: SharedSlots | None = None
        """Slots of awaited verifiers, created once the verifiers' traits are known."""
        self._slots: list[WorkerSlot | SharedSlots] = [*slots]

    async def __aenter__(self) -> "ScorePool":
        """Start one worker, which validates options and imports; the other workers start on demand.

        Raises:
            SettingsError, RewardError: the worker does not start.
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
        turns: GroupTurns | None = None,
    ) -> GroupScores:
        """Return the scores of a group. Its samples queue for free workers, after samples of earlier groups.

        Cancellation replaces the workers that score its samples.

        Args:
            prompt_text: text of the prompt.
            responses: [n] text of each sample.
            metadata: a MessagePack map, or a mapping to encode.
            environment: [n] rewards of the environment, added as a component.
            token_counts: [n] tokens of each sample; by default 0.
            finish_reasons: [n] finish reason of each sample; by default "stop".
            turns: turns of the samples; by default one turn per sample.

        Raises:
            RewardError: a score could not be computed. A `VerifierError` names the verifier.
        """
        n = len(responses)
        turns = turns or GroupTurns([1] * n, [[text] for text in responses], [[""]] * n)
        scores = VerifierScores({}, {}, ())
        if self._config.verifiers:
            counts, reasons = token_counts or [0] * n, finish_reasons or ["stop"] * n
            await self._learn()
            texts = (turns.texts or [], turns.contexts or []) if self.scores_turns else ([], [])
            frame = _group_frame(prompt_text, list(responses), metadata, list(counts), list(reasons), *texts)
            scores = await self._score(GroupFrame(next(self._numbers), frame), turns)
        components = scores.components
        if environment is not None:
            components[ENVIRONMENT] = list(environment)
        return GroupScores(
            rewards=combine(components, self._weights),
            components=components,
            turn_rewards=combine_turns(components, scores.turns, self._weights),
            turn_components=scores.turns,
            remarks=scores.remarks,
        )

    async def _score(self, group: GroupFrame, turns: GroupTurns) -> VerifierScores:
        call = functools.partial(self._call, group)
        try:
            return await GroupScoring(self._config, self._traits, turns, call, self._count).run()
        finally:
            for slot in self._slots:
                slot.forget(group)

    @property
    def scores_turns(self) -> bool:
        """Whether a verifier scores turns; known after entering the pool."""
        return any(traits.by_turn for traits in self._traits)

    async def _call(
        self, group: GroupFrame, verifier: int, samples: Sequence[int], is_over: Callable[[], bool]
    ) -> CallOutcome | None:
        """Return the outcome of a call; None if `is_over` returned True before the call began.

        Raises:
            RewardError: the pool is closed, or a process does not start.
        """
        began = time.monotonic()
        if self._traits[verifier].awaits:
            assert self._shared is not None
            answer = await self._shared.call(group, verifier, samples)
        else:
            async with self._worker() as worker:
                if is_over():
                    return None
                began = time.monotonic()
                try:
                    answer = await worker.call(group, verifier, samples)
                except WorkerEnded as ended:
                    answer = ended.outcome(samples)
        self._count(verifier, "calls")
        self._count(verifier, "seconds", time.monotonic() - began)
        self._count(verifier, "failures", bool(answer.error))
        self._count(verifier, "late", answer.scores.count(None))
        for what, amount in answer.counts.items():
            self._count(verifier, what, amount)
        return answer

    def _count(self, verifier: int, what: str, amount: float = 1.0) -> None:
        """Count an event of a verifier."""
        self.counts[self._config.verifiers[verifier].component, what] += amount

    async def _learn(self) -> None:
        """Read the verifiers' traits from a worker that has imported them."""
        if not self._traits:
            async with self._worker() as worker:
                if self._traits:
                    return
                self._traits = [traits for traits in worker.traits if traits is not None]
            awaited = [
                verifier if traits.awaits else None
                for verifier, traits in zip(self._config.verifiers, self._traits, strict=True)
            ]
            self._shared = SharedSlots(self._config, self._modules, awaited, self._withheld)
            self._slots.append(self._shared)

    async def close(self) -> None:
        """End all workers; groups in progress fail. Idempotent."""
        async with asyncio.TaskGroup() as tasks:
            for slot in self._slots:
                tasks.create_task(slot.close(), name="close-worker")

    @contextlib.asynccontextmanager
    async def _worker(self) -> AsyncIterator[WorkerClient]:
        """Acquire a free slot for one call, and yield its process.

        Raises:
            SettingsError, RewardError: the process does not start, or the pool is closed.
        """
        slot = await self._free.get()
        try:
            yield await slot.worker()
        finally:
            self._free.put_nowait(slot)


def _group_frame(
    prompt_text: str,
    responses: list[str],
    metadata: bytes | msgspec.Raw | Mapping[str, Any],
    *rest: Sequence[Any],
) -> bytes:
    """Return the frame of a group for a worker. Raises RewardError if a text is not valid Unicode."""
    try:
        packed = msgspec.msgpack.encode(dict(metadata)) if isinstance(metadata, Mapping) else bytes(metadata)
        return msgspec.msgpack.encode([prompt_text, responses, packed, *rest])
    except UnicodeEncodeError as error:
        raise RewardError(f"prompt, response or metadata is no valid text: {error}") from None


def check_names(config: RewardConfig) -> None:
    """Check that verifiers have unique names, and that fallbacks exist and have no cycle.

    Raises:
        SettingsError: a name is not unique, or a fallback is missing or cyclic.
    """
    names = [verifier.component for verifier in config.verifiers]
    if len({*names, *OWN}) != len(names) + len(OWN):
        raise SettingsError(
            f"setting reward.verifiers: {', '.join(names)}: each needs a name of its own, "
            f"other than {', '.join(map(repr, OWN))}; give a `label`"
        )
    if wrong := check_fallbacks({item.component: item.fallback for item in config.verifiers}):
        raise SettingsError(f"setting reward.verifiers: {wrong}")

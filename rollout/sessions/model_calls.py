"""Generates completions for one attempt at a sample, within the limits of `[environment]`."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from protocol.errors import EngineError, EpisodeError, InvalidRequest
from rollout.config import EnvironmentConfig
from rollout.engines.base import Completion, Engine, Request, Sampling
from rollout.off_loop import TOKEN, off_loop
from rollout.render import Renderer
from rollout.sample import NOTHING_READ, EpisodeOver
from rollout.seeds import seed_within
from rollout.sessions.record import SampleRecord
from rollout.sessions.sampling import RequestSampling, SamplingRules

EPISODE_ENDED = "the episode has ended; its model cannot be called any more"
ENOUGH_SAMPLES = "sampling.keep_first other samples of its group have finished"
ABORT_S = 1.0
"""Seconds between abort attempts while a request still runs."""
CANCELLED = "cancelled"
"""Failure reason of an attempt whose sample is no longer needed."""


class ModelCalls:
    """Generator of completions for one attempt at a sample (`Generate`), within its limits."""

    def __init__(
        self,
        engine: Engine,
        sampling: Sampling,
        config: EnvironmentConfig,
        max_model_len: int,
        name: str,
        group_end_reason: Callable[[], str] = lambda: "",
        record: SampleRecord | None = None,
        renderer: Renderer | None = None,
        adapter: str = "",
    ) -> None:
        """Start with no calls.

        Args:
            engine, sampling, config, max_model_len: as the fields of `Episodes`.
            record: record of the sample's calls; None: calls are not recorded.
            name: template of request ids, contains `{turn}`.
            group_end_reason: returns why the group was ended from outside; empty: it was not.
            renderer: finds stop strings; None: no stop strings.
            adapter: as in `Request`.
        """
        self._adapter = adapter
        self._renderer = renderer
        self.record = record
        self.sampling = sampling
        self._engine, self._config = engine, config
        self.max_model_len, self.name, self._group_end_reason = max_model_len, name, group_end_reason
        self._call_count = 0
        self._is_closed = False
        self._running: dict[str, asyncio.Timeout] = {}
        """Request id -> timeout of a request that runs on the engine."""
        self._idle = asyncio.Event()
        """Set when the last running request has ended."""
        self.turns = self.tokens = 0
        self.first_prompt = self.later_prompts = NOTHING_READ
        self.error: EngineError | EpisodeError | None = None
        """First error of a call; it fails the attempt even if the environment catches it."""
        self.is_timed_out = False
        """Whether the attempt has timed out."""
        self.is_surplus = False
        """Whether enough other samples of the group have finished."""
        self.cancel_environment: Callable[[], None] = lambda: None
        """Cancels the environment while the attempt runs."""
        self.is_abandoned = False
        """Whether the environment still runs after its cancellation."""

    @property
    def rules(self) -> SamplingRules:
        """Handling of requests with their own sampling parameters."""
        stop = () if self._renderer is None else self._renderer.stop_strings
        return SamplingRules(self._config.sampling, self.sampling, stop, self._engine.capabilities.seeds)

    @property
    def end_reason(self) -> str:
        """Why the attempt was ended from outside; empty if it was not, or if no reason is known."""
        if self.is_timed_out:
            return f"not done within environment.episode_s {self._config.episode_s:g} s"
        return ENOUGH_SAMPLES if self.is_surplus else self._group_end_reason()

    async def __call__(
        self, tokens: tuple[int, ...], max_tokens: int | None, own: RequestSampling | None = None
    ) -> Completion:
        """Generate a completion, see `Generate`; parameters in `own` replace the run's."""
        if self._is_closed:
            raise RuntimeError(EPISODE_ENDED)
        limit = self._limit(len(tokens), max_tokens)
        sampling = replace(self.sampling, seed=seed_within(self.sampling.seed, self._call_count))
        sampling = sampling if own is None else own.applied(sampling)
        request = Request(
            self.name.replace("{turn}", str(self._call_count)),
            tokens,
            replace(sampling, max_tokens=limit),
            self._adapter,
        )
        self._call_count += 1
        try:
            async with asyncio.timeout(self._config.call_s) as timeout:
                self._running[request.id] = timeout
                completion = await self._engine.generate(request)
        except TimeoutError:
            if not timeout.expired():
                raise
            if self._is_closed:
                raise RuntimeError(EPISODE_ENDED) from None
            text = f"request {request.id}: no answer within environment.call_s {self._config.call_s:g} s"
            raise self._failed(EpisodeError("call_s", text)) from None
        except InvalidRequest:
            raise  # fails the group, unless a session reports the invalid request to its harness
        except EngineError as error:
            raise self._failed(error) from None
        finally:
            self._running.pop(request.id, None)
            if not self._running:
                self._idle.set()
        if completion.finish_reason == "abort":
            raise self._aborted(request.id, len(completion.tokens))
        stop_strings = () if own is None else own.stop
        if self._renderer is not None and (stop_strings or self._renderer.stop_strings):
            stopped_length = partial(self._renderer.stopped_length, completion.tokens, stop_strings)
            completion = completion.stopped_at(await off_loop(TOKEN * len(completion.tokens), stopped_length))
        if self.turns:
            self.later_prompts = self.later_prompts.plus(len(tokens), completion.cached_tokens)
        else:
            self.first_prompt = self.first_prompt.plus(len(tokens), completion.cached_tokens)
        self.turns += 1
        self.tokens += len(completion.tokens)
        return completion

    def count_replayed(self, completion: Completion) -> None:
        """Count a call answered from the record."""
        self._call_count += 1
        self.turns += 1
        self.tokens += len(completion.tokens)

    def close(self) -> None:
        """Refuse further calls, and end running calls that the environment's tasks left behind."""
        self._is_closed = True
        for timeout in self._running.values():
            if not timeout.expired():
                timeout.reschedule(0)

    async def cancel(self) -> None:
        """Abort the attempt's requests, which counts their tokens, then cancel its environment."""
        self.is_surplus = True
        while self._running:
            self._idle.clear()
            await self._engine.abort(list(self._running))
            with suppress(TimeoutError):  # an engine may miss a request that is still being submitted
                async with asyncio.timeout(ABORT_S):
                    await self._idle.wait()
        self.cancel_environment()

    def mark_abandoned(self) -> None:
        """Record that the environment still runs after its cancellation."""
        self.is_abandoned = True

    def _limit(self, context: int, max_tokens: int | None) -> int:
        """Return the token limit of the next call. Raises EpisodeOver if no turn or no tokens are left."""
        if self.is_surplus:
            raise self._failed(EpisodeError(CANCELLED, ENOUGH_SAMPLES))
        limit = self.sampling.max_tokens
        if self._call_count:
            if 0 < self._config.max_turns <= self._call_count:
                raise EpisodeOver(f"environment.max_turns {self._config.max_turns} are used up")
            if self.max_model_len:
                room = self.max_model_len - context
                if room < 1:
                    raise EpisodeOver(f"{context} tokens fill engine.max_model_len {self.max_model_len}")
                limit = min(limit, room)
        return limit if max_tokens is None else min(max_tokens, limit)

    def _aborted(self, request: str, tokens: int) -> EngineError | EpisodeError:
        """Return the error of an aborted request, and count its tokens."""
        self.tokens += tokens
        if self.is_surplus:
            return self._failed(EpisodeError(CANCELLED, ENOUGH_SAMPLES))
        return self._failed(EngineError(f"request {request}: the engine aborted it after {tokens} tokens"))

    def _failed(self, error: EngineError | EpisodeError) -> EngineError | EpisodeError:
        self.error = self.error or error
        return error

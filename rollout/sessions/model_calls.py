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

OVER = "the episode has ended; its model cannot be called any more"
ENOUGH = "sampling.keep_first other samples of its group have finished"
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
        end_reason: Callable[[], str] = lambda: "",
        record: SampleRecord | None = None,
        renderer: Renderer | None = None,
        adapter: str = "",
    ) -> None:
        """Start with no calls.

        Args:
            engine, sampling, config, max_model_len: as the fields of `Episodes`.
            record: record of the sample's calls; None: calls are not recorded.
            name: template of request ids, contains `{turn}`.
            end_reason: returns why the group was ended from outside; empty: it was not.
            renderer: finds stop strings; None: no stop strings.
            adapter: as in `Request`.
        """
        self._adapter = adapter
        self._renderer = renderer
        self.record = record
        self.sampling = sampling
        self._engine, self._config = engine, config
        self.max_model_len, self.name, self._ended = max_model_len, name, end_reason
        self._asked = 0
        self._over = False
        self._running: dict[str, asyncio.Timeout] = {}
        """Request id -> timeout of a request that runs on the engine."""
        self._idle = asyncio.Event()
        """Set when the last running request has ended."""
        self.turns = self.tokens = 0
        self.first_prompt = self.later_prompts = NOTHING_READ
        self.error: EngineError | EpisodeError | None = None
        """First error of a call; it fails the attempt even if the environment catches it."""
        self.late = False
        """Whether the attempt has timed out."""
        self.surplus = False
        """Whether enough other samples of the group have finished."""
        self.end: Callable[[], None] = lambda: None
        """Cancels the environment while the attempt runs."""
        self.is_abandoned = False
        """Whether the environment still runs after its cancellation."""

    @property
    def rules(self) -> SamplingRules:
        """Handling of requests with their own sampling parameters."""
        stop = () if self._renderer is None else self._renderer.stop_strings
        return SamplingRules(self._config.sampling, self.sampling, stop, self._engine.capabilities.seeds)

    @property
    def ended(self) -> str:
        """Why the attempt was ended from outside; empty if it was not, or if no reason is known."""
        if self.late:
            return f"not done within environment.episode_s {self._config.episode_s:g} s"
        return ENOUGH if self.surplus else self._ended()

    async def __call__(
        self, tokens: tuple[int, ...], max_tokens: int | None, own: RequestSampling | None = None
    ) -> Completion:
        """Generate a completion, see `Generate`; parameters in `own` replace the run's."""
        if self._over:
            raise RuntimeError(OVER)
        limit = self._limit(len(tokens), max_tokens)
        sampling = replace(self.sampling, seed=seed_within(self.sampling.seed, self._asked))
        sampling = sampling if own is None else own.applied(sampling)
        request = Request(
            self.name.replace("{turn}", str(self._asked)),
            tokens,
            replace(sampling, max_tokens=limit),
            self._adapter,
        )
        self._asked += 1
        try:
            async with asyncio.timeout(self._config.call_s) as timeout:
                self._running[request.id] = timeout
                completion = await self._engine.generate(request)
        except TimeoutError:
            if not timeout.expired():
                raise
            if self._over:
                raise RuntimeError(OVER) from None
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
        more = () if own is None else own.stop
        if self._renderer is not None and (more or self._renderer.stop_strings):
            found = partial(self._renderer.stopped_length, completion.tokens, more)
            completion = completion.stopped_at(await off_loop(TOKEN * len(completion.tokens), found))
        if self.turns:
            self.later_prompts = self.later_prompts.plus(len(tokens), completion.cached_tokens)
        else:
            self.first_prompt = self.first_prompt.plus(len(tokens), completion.cached_tokens)
        self.turns += 1
        self.tokens += len(completion.tokens)
        return completion

    def count_replayed(self, completion: Completion) -> None:
        """Count a call answered from the record."""
        self._asked += 1
        self.turns += 1
        self.tokens += len(completion.tokens)

    def close(self) -> None:
        """Refuse further calls, and end running calls that the environment's tasks left behind."""
        self._over = True
        for timeout in self._running.values():
            if not timeout.expired():
                timeout.reschedule(0)

    async def cancel(self) -> None:
        """Abort the attempt's requests, which counts their tokens, then cancel its environment."""
        self.surplus = True
        while self._running:
            self._idle.clear()
            await self._engine.abort(list(self._running))
            with suppress(TimeoutError):  # an engine may miss a request that is still being submitted
                async with asyncio.timeout(ABORT_S):
                    await self._idle.wait()
        self.end()

    def mark_abandoned(self) -> None:
        """Record that the environment still runs after its cancellation."""
        self.is_abandoned = True

    def _limit(self, context: int, max_tokens: int | None) -> int:
        """Return the token limit of the next call. Raises EpisodeOver if no turn or no tokens are left."""
        if self.surplus:
            raise self._failed(EpisodeError(CANCELLED, ENOUGH))
        most = self.sampling.max_tokens
        if self._asked:
            if 0 < self._config.max_turns <= self._asked:
                raise EpisodeOver(f"environment.max_turns {self._config.max_turns} are used up")
            if self.max_model_len:
                room = self.max_model_len - context
                if room < 1:
                    raise EpisodeOver(f"{context} tokens fill engine.max_model_len {self.max_model_len}")
                most = min(most, room)
        return most if max_tokens is None else min(max_tokens, most)

    def _aborted(self, request: str, tokens: int) -> EngineError | EpisodeError:
        """Return the error of an aborted request, and count its tokens."""
        self.tokens += tokens
        if self.surplus:
            return self._failed(EpisodeError(CANCELLED, ENOUGH))
        return self._failed(EngineError(f"request {request}: the engine aborted it after {tokens} tokens"))

    def _failed(self, error: EngineError | EpisodeError) -> EngineError | EpisodeError:
        self.error = self.error or error
        return error

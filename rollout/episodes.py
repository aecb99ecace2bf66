"""Runs the episodes of a group, with time limits, bounded attempts and a reason for each failure.

A failed episode fails one sample and never counts as a reward. The whole group fails only for causes that a
retry cannot change: a dead engine, or a prompt that does not fit the environment.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

from protocol.errors import EngineError, EpisodeError, SettingsError
from protocol.user_code import located, mutable_copy
from rollout.abandoned_tasks import AbandonedTasks
from rollout.config import EnvironmentConfig
from rollout.engines.base import Engine, Sampling
from rollout.environments.base import Environment
from rollout.prompts.base import Prompt
from rollout.render import Renderer
from rollout.sample import NOTHING_READ, EpisodeOver, PromptTokens, Sample
from rollout.seeds import seed_within
from rollout.sessions.model_calls import CANCELLED, ENOUGH_SAMPLES, ModelCalls
from rollout.sessions.record import Recording

FAILURES = ("call_s", "episode_s", "length", "replay", "error", CANCELLED)
"""Reasons of failed episodes.

- `call_s`, `episode_s`: a time limit of `[environment]` expired.
- `length`: the environment did not handle `EpisodeOver`.
- `replay`: calls are recorded, but the harness must not run again, or all calls are too old to train.
- `error`: the environment raised an exception.
- `cancelled`: `sampling.keep_first` other samples of the group finished first."""
MAX_ERROR = 500
"""Maximum characters of a reported error."""


@dataclass(frozen=True, slots=True)
class EpisodeReport:
    """Outcome of one attempt at a sample."""

    sample: int
    """Index in the group."""
    attempt: int
    """Attempt number, from 0."""
    turns: int
    """Number of answered model calls."""
    tokens: int
    """Sampled tokens, including replayed calls."""
    seconds: float
    failure: str = ""
    """One of `FAILURES`; empty if the attempt produced a sample."""
    error: str = ""
    first_prompt: PromptTokens = NOTHING_READ
    """Prompt tokens of the first call."""
    later_prompts: PromptTokens = NOTHING_READ
    """Prompt tokens of all later calls; each prompt contains the whole history."""
    replayed: int = 0
    """Number of calls answered from the record."""
    diverged: int = 0
    """Number of recorded calls that the harness did not repeat."""


@dataclass(slots=True)
class Race:
    """Running attempts of a group that keeps only the first `keep` samples to finish."""

    keep: int
    """Number of samples to keep; 0: all."""
    finished: int = 0
    """Number of samples kept so far."""
    running: set[ModelCalls] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        """Whether `keep` samples have finished."""
        return 0 < self.keep <= self.finished

    def finish(self) -> None:
        """Count a finished sample. Raises EpisodeError if the race is already over."""
        if self.is_over:
            raise EpisodeError(CANCELLED, ENOUGH_SAMPLES)
        self.finished += 1

    async def cancel_rest(self) -> None:
        """Cancel the running attempts if the race is over."""
        async with asyncio.TaskGroup() as tasks:
            for calls in self.running if self.is_over else ():
                tasks.create_task(calls.cancel(), name=f"cancel-{calls.name}")


@dataclass(frozen=True, slots=True)
class Episodes:
    """Runner of a group's episodes, with everything that the samples share."""

    environment: Environment
    prompt: Prompt
    prompt_tokens: tuple[int, ...]
    renderer: Renderer
    engine: Engine
    sampling: Sampling
    config: EnvironmentConfig
    max_model_len: int
    """Limit on prompt plus sample, tokens; 0: unknown."""
    report: Callable[[EpisodeReport], None]
    """Callback after each attempt at a sample."""
    group_end_reason: Callable[[], str] = lambda: ""
    """Returns why the group was ended from outside. Called after its episodes are cancelled."""
    recording: Recording | None = None
    """Recorder of session calls; None: calls are not recorded."""
    abandoned_tasks: AbandonedTasks = field(default_factory=AbandonedTasks)
    """Abandoned episodes of the process: those still running after their cancellation."""

    async def samples(self, n: int, min_samples: int, name: str, keep: int = 0) -> list[Sample]:
        """Return the samples that did not fail, at least `min_samples` of `n`.

        A failure of the group cancels all samples. Cancelling the call leaves no request on the engine.

        Args:
            n: samples to generate.
            min_samples: minimum number of successful samples.
            keep: cancel the other samples after this many have finished; 0: wait for all.
            name: template of request ids, with `{sample}` and `{turn}`. It contains the lease token, because
                ids must differ when the group is leased again.

        Raises:
            EngineError: the engine failed, or aborted a request on its own.
            SettingsError: the prompt does not fit the environment.
            EpisodeError: fewer than `min_samples` samples succeeded.
        """
        race = Race(keep)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._sample(i, name, race), name=f"sample-{self.prompt.index}/{i}")
                    for i in range(n)
                ]
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        results = [task.result() for task in running]
        samples = [result for result in results if isinstance(result, Sample)]
        failed = [result for result in results if isinstance(result, EpisodeError)]
        if failed and len(samples) < min_samples:
            text = f"{len(failed)} of {n} episodes failed, such as: {failed[0].error}"
            raise EpisodeError(failed[0].reason, text)
        return samples

    async def _sample(self, index: int, name: str, race: Race) -> Sample | EpisodeError:
        """Return a sample, or the failure of its last attempt."""
        failure = EpisodeError("error", "not tried")
        began = time.monotonic()
        recorded = self.recording is not None and self.environment.has_calls
        record = self.recording.sample(index) if self.recording is not None and recorded else None
        sampling = replace(self.sampling, seed=seed_within(self.sampling.seed, index))
        last = self.config.attempts
        for attempt in itertools.count():
            left_s = began + self.config.episode_s - time.monotonic()
            if left_s <= 0 or attempt >= last or race.is_over:
                break
            ids = name.replace("{sample}", str(index)) + (f".{attempt}" if attempt else "")
            calls = ModelCalls(
                self.engine, sampling, self.config, self.max_model_len, ids, self.group_end_reason, record,
                self.renderer,
            )  # fmt: skip
            result = await self._reported(index, attempt, calls, left_s, race)
            if isinstance(result, Sample):
                await race.cancel_rest()
                return result
            failure = result
            last += result.reason == "replay" and record is not None and record.replayed > 0
        return failure

    async def _reported(
        self, index: int, attempt: int, calls: ModelCalls, left_s: float, race: Race
    ) -> Sample | EpisodeError:
        began = time.monotonic()
        result: Sample | EpisodeError
        race.running.add(calls)
        try:
            result = await self._attempt(calls, left_s)
            race.finish()
        except EpisodeError as error:
            result = error
        finally:
            race.running.discard(calls)
            calls.close()
        failure, text = ("", "") if isinstance(result, Sample) else (result.reason, result.error)
        seconds = time.monotonic() - began
        replayed = calls.record.replayed if calls.record else 0
        unused = calls.record.remaining if calls.record and not failure else 0
        self.report(
            EpisodeReport(
                index, attempt, calls.turns, calls.tokens, seconds, failure, text,
                calls.first_prompt, calls.later_prompts, replayed, unused,
            )
        )  # fmt: skip
        return result

    async def _attempt(self, calls: ModelCalls, left_s: float) -> Sample:
        """Run one attempt. Raises EpisodeError if the attempt failed, and the errors of `samples`."""
        failure: EpisodeError | None = None
        sample: Sample | None = None
        prompt = replace(self.prompt, metadata=mutable_copy(self.prompt.metadata))
        try:
            async with _limited(calls, left_s) as limit:
                try:
                    sample = await self.abandoned_tasks.run(
                        lambda: self.environment.run(prompt, self.prompt_tokens, calls, self.renderer),
                        f"episode-{calls.name.replace('.{turn}', '')}",
                        calls.mark_abandoned,
                    )
                except (SettingsError, EngineError, EpisodeError):
                    raise
                except asyncio.CancelledError as error:
                    if (task := asyncio.current_task()) is not None and task.cancelling():
                        raise
                    failure = EpisodeError("error", located(error))  # raised by the environment itself
                except EpisodeOver as error:
                    failure = EpisodeError("length", str(error))
                except (Exception, BaseExceptionGroup, SystemExit) as error:  # user code may raise anything
                    failure = EpisodeError("error", located(error)[:MAX_ERROR])
        except TimeoutError:
            pass  # `limit` has expired; other TimeoutErrors are caught inside
        if calls.error is not None:
            raise calls.error
        if calls.is_surplus and not calls.is_timed_out:
            raise EpisodeError(CANCELLED, ENOUGH_SAMPLES)
        if limit.expired():
            on = ", and it ignored its cancellation" if calls.is_abandoned else ""
            raise EpisodeError("episode_s", calls.end_reason + on)
        if failure is not None:
            raise failure
        return _checked(sample, calls)


def _checked(sample: Sample | None, calls: ModelCalls) -> Sample:
    """Return the sample of an attempt. Raises EpisodeError for a missing or unencodable sample."""
    if isinstance(sample, Sample) and not sample.is_trained() and calls.record and calls.record.replayed:
        text = "all recorded calls are older than the lease, so none may be trained; the sample restarts"
        raise EpisodeError("replay", text)
    if not isinstance(sample, Sample) or not sample.is_trained():
        raise EpisodeError("error", "the environment returned no sample with tokens of the model")
    try:
        (sample.response or "").encode()
    except UnicodeEncodeError as error:
        raise EpisodeError("error", f"the response is not valid text: {error}") from None
    return sample


@contextlib.asynccontextmanager
async def _limited(calls: ModelCalls, seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Cancel the block after `seconds`; model calls see the reason before the cancellation."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:

        def expire() -> None:
            if not limit.expired():
                calls.is_timed_out = not calls.is_surplus
                limit.reschedule(loop.time())

        timer, calls.cancel_environment = loop.call_later(seconds, expire), expire
        try:
            yield limit
        finally:
            timer.cancel()
            calls.cancel_environment = lambda: None


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first

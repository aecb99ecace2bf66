"""Builds a sample from the model calls that a harness sends to a URL."""

import asyncio
import logging
import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from annotated_types import Interval

from protocol.errors import SettingsError
from rollout.abandoned_tasks import result_or_exception
from rollout.config import EnvironmentConfig, SamplingConfig
from rollout.engines.base import EngineConfig
from rollout.environments.base import Environment
from rollout.off_loop import TOKEN, off_loop
from rollout.programs.outcome import AnswerText, Outcome
from rollout.programs.program import ProgramKilled
from rollout.prompts.base import Prompt
from rollout.render import RenderConfig, Renderer
from rollout.sample import EpisodeOver, Generate, Sample
from rollout.sessions.answers.reader import AnswerReader
from rollout.sessions.branches import branches_of
from rollout.sessions.calls import context_tokens
from rollout.sessions.endpoint import MAX_CONNECTIONS, SessionEndpoint
from rollout.sessions.model_calls import ModelCalls
from rollout.sessions.results import Results
from rollout.sessions.session import Session, SessionLimits

log = logging.getLogger("tether.sessions")

HIDDEN = "hidden_"
"""Prefix of metadata names that are hidden from harnesses, such as tests of their answer; verifiers see them.
"""
END_S = 1.0
"""Seconds between ending a session from outside and cancelling or killing its harness. Meanwhile its calls
are refused with the reason."""


@dataclass(frozen=True, slots=True)
class SessionOptions(SessionLimits):
    """Options of all environments whose harness calls a URL."""

    body_mb: Annotated[int, Interval(ge=1, le=1024)] = 16
    """Maximum request body, MiB."""
    tool_syntax: str = "hermes"
    """Syntax of the model's tool calls: `hermes`, JSON between <tool_call> tags; `json`, an answer that is
    one JSON object; `none`, no tool calls; `vllm:NAME` or `sglang:NAME`, a parser of that engine."""
    reasoning_syntax: str = "none"
    """Syntax of the model's thoughts, returned as `reasoning_content`. `think`: between <think> tags; `none`:
    part of the text; `vllm:NAME` or `sglang:NAME`, a parser of that engine."""
    replayable: bool = True
    """Whether a harness may run again on its recorded calls after its worker was lost or a signal ended it.
    False: the sample fails."""


def check_limits(config: EnvironmentConfig, groups: int, sampling: SamplingConfig) -> None:
    """Check the connection limit of a worker's sessions, and the call limit of a session.

    Args:
        config: environment whose harness calls a URL.
        groups: `rollout.groups_in_flight`.
        sampling: section `[sampling]`.

    Raises:
        SettingsError: a limit is exceeded; the message names the settings and valid values.
    """
    count, most = groups * sampling.samples_per_prompt, MAX_CONNECTIONS // sampling.samples_per_prompt
    if count > MAX_CONNECTIONS:
        raise SettingsError(
            f"setting rollout.groups_in_flight: {groups} groups of sampling.samples_per_prompt "
            f"{sampling.samples_per_prompt} are {count} sessions at once, and the endpoint of a worker takes "
            f"{MAX_CONNECTIONS} connections; set "
            + (f"it to {most} or less" if most else f"samples_per_prompt to {MAX_CONNECTIONS} or less")
        )
    calls = config.options.get("max_calls", SessionLimits().max_calls)
    if isinstance(calls, int) and config.max_turns > calls:
        raise SettingsError(
            f"setting environment.max_turns: {config.max_turns} is above environment.options.max_calls, "
            f"{calls}, after which a session is refused in the middle of its episode; make max_turns smaller "
            "or max_calls larger"
        )


def check_rendering(config: RenderConfig) -> None:
    """Refuse `render.system` and `render.suffix`, which do not apply to requests written by a harness.

    Raises:
        SettingsError: one of them is set; the message names it.
    """
    for name, value in (("system", config.system), ("suffix", config.suffix)):
        if value:
            raise SettingsError(
                f"setting render.{name}: {value!r} would be in no request, since a harness writes them; "
                "leave it empty, and put the text into the harness or, by prompts.template, into the prompts"
            )


@dataclass(frozen=True, slots=True)
class Task:
    """Task of one sample, as passed to a harness."""

    url: str
    """Base URL for OpenAI clients; contains the session's key."""
    key: str
    """API key for clients. Ignored on loopback."""
    prompt: Prompt
    """The prompt without metadata whose names start with `hidden_`."""
    results: Results = field(default_factory=Results, repr=False, compare=False)
    """Recorded tool results, for `once`."""

    async def once(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        """Return the recorded result of a tool call, or run `work` and record its result.

        A recorded call never runs again, even after a crash. The result must be a JSON value.
        The result is on disk on return. Exceptions are not
        recorded.

        Raises:
            RequestRefused: the name or result is invalid, a limit is reached, or the session has ended.
            EpisodeError: the result cannot be recorded.
        """
        return await self.results.once(name, work)

    def as_json(self) -> dict[str, Any]:
        """Return the prompt as a JSON object, without URL and key."""
        messages = self.prompt.messages or [("user", self.prompt.text)]
        return {
            "text": self.prompt.text,
            "messages": [{"role": role, "content": content} for role, content in messages],
            "metadata": dict(self.prompt.metadata),
        }


def shown(prompt: Prompt) -> Prompt:
    """Return the prompt without metadata reserved for verifiers."""
    kept = {name: value for name, value in prompt.metadata.items() if not str(name).startswith(HIDDEN)}
    return replace(prompt, metadata=kept)


class SessionEnvironment(Environment):
    """Environment whose harness calls the model over HTTP; subclasses run the harness.

    The endpoint starts with `open` or the first sample.
    """

    files_per_sample = 3
    """The connection, its other end or the program's output, and the lock of the program's directory."""
    has_calls = True

    def __init__(self, options: SessionOptions) -> None:
        self._limits, self._config = options, EnvironmentConfig()
        self._reader = AnswerReader(options.tool_syntax, options.reasoning_syntax)
        self._endpoint: SessionEndpoint | None = None
        self._starting = asyncio.Lock()

    @abstractmethod
    async def act(self, task: Task) -> Outcome:
        """Run the harness on a task, and return its outcome.

        Raises:
            ProgramKilled: a signal ended the harness; the next attempt replays the record.
            Exception: the attempt failed.
        """

    async def run(
        self, prompt: Prompt, prompt_tokens: tuple[int, ...], generate: Generate, renderer: Renderer
    ) -> Sample:
        endpoint = await self._started()
        calls = generate if isinstance(generate, ModelCalls) else None
        record = calls.record if calls else None
        if record is not None:
            await record.begin(replayable=self._limits.replayable)
        on_replayed = calls.count_replayed if calls else None
        max_model_len = calls.max_model_len if calls else 0
        rules = calls.rules if calls else None
        session = Session(
            generate, renderer, self._limits, self._reader, record, on_replayed, max_model_len, rules, calls
        )
        key = endpoint.open(session)
        task = Task(endpoint.url(key), endpoint.token(key), shown(prompt), session.results)
        try:
            outcome = await self._acted(task, lambda: endpoint.end(key, end_reason_of(generate)))
        except Exception as error:
            if record is not None and isinstance(error, ProgramKilled):
                record.resume()
            if session.truncated:
                raise EpisodeOver("the harness did not handle that no turn or no room was left") from None
            raise
        finally:
            endpoint.end(key, "its episode is over")
            await session.drained()
        if session.restarts or session.overridden:
            log.warning(
                "session.deviations prompt=%d restarts=%d not_applied=%d calls=%d",
                prompt.index, session.restarts, session.overridden, len(session.tree.calls),
            )  # fmt: skip
        if record is not None:
            record.warn_of_remaining()
        reward = None if isinstance(outcome, AnswerText) else outcome
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"the harness gave the reward {reward!r}, which is not a finite number")
        answered = session.tree.calls
        tokens = sum(len(call.inserted) + len(call.completion.tokens) for call in answered)
        sample = await off_loop(TOKEN * tokens * len(answered), lambda: sample_of(session, reward))
        return replace(sample, response=outcome.text) if isinstance(outcome, AnswerText) else sample

    async def _acted(self, task: Task, end: Callable[[], None]) -> Outcome:
        """Run the harness. If cancelled, `end` its session and give the harness `END_S` to finish."""
        async with asyncio.TaskGroup() as tasks:
            acting = tasks.create_task(result_or_exception(lambda: self.act(task)), name="session.harness")
            try:
                await asyncio.wait([acting])
            except asyncio.CancelledError:
                end()
                await asyncio.wait([acting], timeout=END_S)
                raise  # the task group cancels the harness
        outcome = acting.result()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def open(self) -> None:
        """Start the endpoint.

        Raises:
            SettingsError: the port is in use, or the certificate is missing.
        """
        await self._started()

    async def close(self) -> None:
        """Stop the endpoint."""
        if self._endpoint is not None:
            await self._endpoint.close()
        await self._reader.close()

    def apply_config(self, config: EnvironmentConfig) -> None:
        """Store the endpoint's address."""
        self._config = config

    def apply_engine_config(self, engine: EngineConfig) -> None:
        """Store the location of SGLang, for its parsers."""
        self._reader = AnswerReader(
            self._limits.tool_syntax, self._limits.reasoning_syntax, engine.python, engine.environment
        )

    def check(self, model_dir: str) -> None:
        """Check that the engine's parsers exist and accept the model's tokenizer."""
        self._reader.check(model_dir)

    async def _started(self) -> SessionEndpoint:
        async with self._starting:
            if self._endpoint is None:
                endpoint = SessionEndpoint(self._config, body_mb=self._limits.body_mb)
                await endpoint.start()
                self._endpoint = endpoint
        return self._endpoint


def end_reason_of(generate: Generate) -> str:
    """Return why an episode was ended from outside, as recorded by its model calls."""
    known = generate.end_reason if isinstance(generate, ModelCalls) else ""
    return known or "its episode was cancelled"


def sample_of(session: Session, reward: float | None) -> Sample:
    """Return the sample of an ended session.

    Raises:
        ValueError: the harness made no call, or every call used its own sampling parameters.
    """
    calls = session.tree.calls
    if not calls:
        raise ValueError("the harness ended without a call of the model")
    if all(call.has_own_sampling for call in calls):
        raise ValueError(
            "every call of the harness set its own sampling parameters (environment.sampling), so no token "
            "of the episode may be trained; let it make a call with the run's sampling"
        )
    first, *others = branches_of(session.tree)
    prompt = context_tokens(calls[0].parent, calls[0].inserted)  # the parent may have been withdrawn
    start = len(prompt)
    cut = session.truncated or calls[-1].completion.finish_reason == "length"
    return Sample(
        tokens=first.tokens[start:],
        logprobs=first.logprobs[start:],
        loss_mask=first.loss_mask[start:],
        spans=tuple((end - start, version) for end, version in first.spans if end > start),
        finish_reason="length" if cut else "environment",
        reward=reward,
        prompt=prompt,
        branches=tuple(others),
        response=session.renderer.text(calls[-1].completion.tokens),
        calls=tuple((number, begin - start, end - start) for number, begin, end in first.calls),
        recorded=_recorded(session),
        turns=tuple((place, begin - start, end - start) for place, begin, end in first.turns),
    )


def _recorded(session: Session) -> tuple[int, tuple[int, ...]] | None:
    if session.record is None:
        return None
    placed = [call.number for call in session.tree.calls]
    return session.record.index, tuple(session.record.abandoned(placed))

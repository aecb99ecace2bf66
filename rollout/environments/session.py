"""Makes a sample of the model calls that a harness sends to a URL."""

import asyncio
import logging
import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from annotated_types import Interval

from protocol.errors import SettingsError
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
from rollout.strays import caught

log = logging.getLogger("tether.sessions")

HIDDEN = "hidden_"
"""How names of metadata begin that verifiers get and harnesses do not, such as tests of their answer."""
END_S = 1.0
"""Seconds that a harness has to end by itself once its session was ended from outside, before it is cancelled
or killed. Its calls are refused in that time, and say why."""


@dataclass(frozen=True, slots=True)
class SessionOptions(SessionLimits):
    """Options of every environment whose harness talks to a URL."""

    body_mb: Annotated[int, Interval(ge=1, le=1024)] = 16
    """Largest body of a request, MiB."""
    tool_syntax: str = "hermes"
    """How the model writes tool calls: `hermes`, JSON between <tool_call> tags; `json`, an answer that is one
    JSON object; `none`, not at all; `vllm:NAME` and `sglang:NAME`, a parser of that engine."""
    reasoning_syntax: str = "none"
    """How the model writes thoughts, which clients get as `reasoning_content`. `think`: between <think> tags;
    `none`: as text; `vllm:NAME` and `sglang:NAME`, a parser of that engine."""
    replayable: bool = True
    """Whether the harness may be run again on the calls that were recorded before its worker was lost, or a
    signal ended it. Otherwise such a sample fails."""


def check_limits(config: EnvironmentConfig, groups: int, sampling: SamplingConfig) -> None:
    """Check that a worker's sessions have connections, and the turns of one are calls that it may make.

    Args:
        config: of an environment whose harness talks to a URL.
        groups: `rollout.groups_in_flight`.
        sampling: as configured.

    Raises:
        SettingsError: names the settings, their values, and what they can be.
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
    """Check that no setting for rendered prompts is given: a harness's requests have none.

    Raises:
        SettingsError: names the setting.
    """
    for name, value in (("system", config.system), ("suffix", config.suffix)):
        if value:
            raise SettingsError(
                f"setting render.{name}: {value!r} would be in no request, since a harness writes them; "
                "leave it empty, and put the text into the harness or, by prompts.template, into the prompts"
            )


@dataclass(frozen=True, slots=True)
class Task:
    """Task of one sample, as a harness gets it."""

    url: str
    """Base URL for clients of the OpenAI API, with the session's key in it."""
    key: str
    """What clients send as their API key. On loopback it is not read."""
    prompt: Prompt
    """The prompt, without metadata whose names begin with `hidden_`."""
    results: Results = field(default_factory=Results, repr=False, compare=False)
    """What tools answered, for `once`."""

    async def once(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run a tool once, also over kills: return its recorded result, or run `work`.

        Its result, a JSON value, is on disk when this returns. An exception is not recorded.

        Raises:
            RequestRefused: the name or the result does not fit, there are too many, or the session has ended.
            EpisodeError: the result cannot be recorded.
        """
        return await self.results.once(name, work)

    def as_json(self) -> dict[str, Any]:
        """Return the task of the prompt, without URL and key."""
        messages = self.prompt.messages or [("user", self.prompt.text)]
        return {
            "text": self.prompt.text,
            "messages": [{"role": role, "content": content} for role, content in messages],
            "metadata": dict(self.prompt.metadata),
        }


def shown(prompt: Prompt) -> Prompt:
    """Return a prompt as harnesses get it, without metadata that verifiers alone get."""
    kept = {name: value for name, value in prompt.metadata.items() if not str(name).startswith(HIDDEN)}
    return replace(prompt, metadata=kept)


class SessionEnvironment(Environment):
    """Environment whose harness makes model calls by HTTP; a subclass runs the harness.

    The endpoint starts with `open`, or with the first sample.
    """

    files_per_sample = 3
    """The connection, its other end or the output of a program, and the lock of its directory."""
    has_calls = True

    def __init__(self, options: SessionOptions) -> None:
        self._limits, self._config = options, EnvironmentConfig()
        self._reader = AnswerReader(options.tool_syntax, options.reasoning_syntax)
        self._endpoint: SessionEndpoint | None = None
        self._starting = asyncio.Lock()

    @abstractmethod
    async def act(self, task: Task) -> Outcome:
        """Let the harness work on a task, and return its outcome.

        Raises:
            ProgramKilled: a signal ended it; the next attempt goes by the record.
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
        most = calls.max_model_len if calls else 0
        rules = calls.rules if calls else None
        session = Session(
            generate, renderer, self._limits, self._reader, record, on_replayed, most, rules, calls
        )
        key = endpoint.open(session)
        task = Task(endpoint.url(key), endpoint.token(key), shown(prompt), session.results)
        try:
            outcome = await self._acted(task, lambda: endpoint.end(key, reason_of(generate)))
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
            raise ValueError(f"the harness gave the reward {reward!r}, which is no finite number")
        answered = session.tree.calls
        tokens = sum(len(call.inserted) + len(call.completion.tokens) for call in answered)
        sample = await off_loop(TOKEN * tokens * len(answered), lambda: sample_of(session, reward))
        return replace(sample, response=outcome.text) if isinstance(outcome, AnswerText) else sample

    async def _acted(self, task: Task, end: Callable[[], None]) -> Outcome:
        """Let the harness work; once that is cancelled, `end` its session, and wait `END_S` for it to end."""
        async with asyncio.TaskGroup() as tasks:
            acting = tasks.create_task(caught(lambda: self.act(task)), name="session.harness")
            try:
                await asyncio.wait([acting])
            except asyncio.CancelledError:
                end()
                await asyncio.wait([acting], timeout=END_S)
                raise  # which cancels what still runs
        outcome = acting.result()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def open(self) -> None:
        """Serve.

        Raises:
            SettingsError: the port is used by another process, or there is no such certificate.
        """
        await self._started()

    async def close(self) -> None:
        """Stop serving."""
        if self._endpoint is not None:
            await self._endpoint.close()
        await self._reader.close()

    def configured(self, config: EnvironmentConfig) -> None:
        """Learn where the endpoint listens."""
        self._config = config

    def answered_by(self, engine: EngineConfig) -> None:
        """Learn where SGLang is, for its parsers."""
        self._reader = AnswerReader(
            self._limits.tool_syntax, self._limits.reasoning_syntax, engine.python, engine.environment
        )

    def check(self, model_dir: str) -> None:
        """Check that an engine's parsers exist and take the model's tokenizer."""
        self._reader.check(model_dir)

    async def _started(self) -> SessionEndpoint:
        async with self._starting:
            if self._endpoint is None:
                endpoint = SessionEndpoint(self._config, body_mb=self._limits.body_mb)
                await endpoint.start()
                self._endpoint = endpoint
        return self._endpoint


def reason_of(generate: Generate) -> str:
    """Return why an episode is ended from outside, as far as its model calls know."""
    known = generate.ended if isinstance(generate, ModelCalls) else ""
    return known or "its episode was cancelled"


def sample_of(session: Session, reward: float | None) -> Sample:
    """Return the sample of a session that has ended.

    Raises:
        ValueError: the harness made no call.
    """
    calls = session.tree.calls
    if not calls:
        raise ValueError("the harness ended without a call of the model")
    if all(call.as_asked for call in calls):
        raise ValueError(
            "every call of the harness asked for sampling of its own (environment.sampling), so no token of "
            "the episode may be trained; let it make a call with the run's sampling"
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

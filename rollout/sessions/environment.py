"""Makes a sample of what a harness does with a URL."""

import asyncio
import logging
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from protocol.choices import checked_name
from rollout.environments.base import Environment, EpisodeOver, Generate, Sample
from rollout.prompts.base import Prompt
from rollout.render import Renderer
from rollout.sessions.branches import branches_of
from rollout.sessions.endpoint import SessionEndpoint
from rollout.sessions.record import SampleRecord
from rollout.sessions.session import Session, SessionLimits
from rollout.sessions.tool_calls import PARSERS

log = logging.getLogger("tether.sessions")

SAMPLING = ("refuse", "run")


@dataclass(frozen=True, slots=True)
class SessionOptions(SessionLimits):
    """Options of every environment whose harness talks to a URL."""

    body_mb: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Largest body of a request, MiB."""
    sampling: str = "refuse"
    """What a request with a temperature or the like gets. `refuse`: an error. `run`: the parameters of
    `[sampling]`, and a header that says so."""
    tool_syntax: str = "hermes"
    """How the model writes tool calls: `hermes`, JSON between <tool_call> tags; `json`, an answer that is one
    JSON object; `none`, not at all."""
    replayable: bool = True
    """Whether the harness may be run again on the calls that a lost worker recorded. Otherwise such a sample
    fails."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a harness is given."""

    url: str
    """Base URL for clients of the OpenAI API, with the session's key in it."""
    key: str
    """The key, for clients that want one."""
    prompt: Prompt

    def as_json(self) -> dict[str, Any]:
        """Return the task of the prompt, without URL and key."""
        messages = self.prompt.messages or [("user", self.prompt.text)]
        return {
            "text": self.prompt.text,
            "messages": [{"role": role, "content": content} for role, content in messages],
            "metadata": dict(self.prompt.metadata),
        }


class SessionEnvironment(Environment):
    """Environment whose harness makes model calls by HTTP; a subclass says what the harness is.

    The endpoint starts with the first sample.
    """

    has_calls = True

    def __init__(self, options: SessionOptions) -> None:
        checked_name(options.sampling, SAMPLING, "setting environment.options.sampling:")
        checked_name(options.tool_syntax, PARSERS, "setting environment.options.tool_syntax:")
        self._limits = options
        self._endpoint: SessionEndpoint | None = None
        self._starting = asyncio.Lock()

    @abstractmethod
    async def act(self, task: Task) -> float | None:
        """Let the harness work on a task, and return its reward, None if verifiers score it.

        Raises:
            Exception: the attempt failed.
        """

    async def run(
        self, prompt: Prompt, prompt_tokens: tuple[int, ...], generate: Generate, renderer: Renderer
    ) -> Sample:
        endpoint = await self._started()
        record: SampleRecord | None = getattr(generate, "record", None)
        if record is not None:
            await record.begin(replayable=self._limits.replayable)
        session = Session(
            generate, renderer, self._limits, tool_syntax=self._limits.tool_syntax, record=record
        )
        key = endpoint.open(session)
        try:
            reward = await self.act(Task(endpoint.url(key), key, prompt))
        except Exception:
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
        if record is not None and record.left:
            log.warning(
                "session.diverged group=%d sample=%d replayed=%d not_asked=%d",
                record.recording.group, record.index, record.replayed, record.left,
            )  # fmt: skip
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"the harness gave the reward {reward!r}, which is no finite number")
        return sample_of(session, reward)

    async def close(self) -> None:
        """Stop serving."""
        if self._endpoint is not None:
            await self._endpoint.close()

    async def _started(self) -> SessionEndpoint:
        async with self._starting:
            if self._endpoint is None:
                endpoint = SessionEndpoint(
                    body_mb=self._limits.body_mb, override=self._limits.sampling == "run"
                )
                await endpoint.start()
                self._endpoint = endpoint
        return self._endpoint


def sample_of(session: Session, reward: float | None) -> Sample:
    """Return the sample of a session that has ended.

    Raises:
        ValueError: the harness made no call.
    """
    calls = session.tree.calls
    if not calls:
        raise ValueError("the harness ended without a call of the model")
    first, *others = branches_of(session.tree)
    prompt, start = calls[0].inserted, len(calls[0].inserted)
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
    )


def _recorded(session: Session) -> tuple[int, tuple[int, ...]] | None:
    if session.record is None:
        return None
    placed = [call.number for call in session.tree.calls]
    return session.record.index, tuple(session.record.without_place(placed))

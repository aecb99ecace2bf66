"""Runs the calls of one session on the engine, and records them."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import xxhash
from msgspec import Meta

from protocol.errors import EngineError, EpisodeError, InvalidRequest, SettingsError
from rollout.engines.base import Completion
from rollout.environments.base import EpisodeOver, Generate
from rollout.render import Renderer
from rollout.sessions.answers.reader import AnswerReader, ReadAnswer
from rollout.sessions.calls import CallTree, ModelCall, TextEnd, context_tokens, text_end
from rollout.sessions.messages import read_message
from rollout.sessions.record import SampleRecord, key_of
from rollout.sessions.refusal import RequestRefused, ended, invalid
from rollout.sessions.requests import Asked
from rollout.sessions.results import Results
from rollout.sessions.template import added, whole


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What one session may do."""

    max_calls: Annotated[int, Meta(ge=1, le=10**4)] = 256
    """Calls that are answered; no more than a sample may record."""
    max_running: Annotated[int, Meta(ge=1, le=10**5)] = 64
    """Calls that run at once."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A call that was checked and not answered yet."""

    asked: Asked
    parent: ModelCall | None
    inserted: tuple[int, ...]
    """As in `ModelCall`."""
    context: tuple[int, ...]
    """The tokens that the answer continues."""

    def key(self) -> tuple[str, str]:
        """Return what the call is found by in a record."""
        asked = self.asked
        request = asked.prompt if asked.dialogue is None else asked.dialogue.keys[-1]
        return key_of(f"{request!r} {asked.max_tokens} {asked.tools}", self.context)


Answered = tuple[int, Completion, ReadAnswer]
"""The number of an answer in the record, -1 without one; the answer; and what was read from it."""


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """The answer to a call, as its client gets it."""

    call: ModelCall
    prompt_tokens: int
    text: str
    """The answer to a completion."""
    message: dict[str, Any]
    """As the chat API has it."""
    finish_reason: str
    """"stop", "length" or "tool_calls"."""


class Session:
    """One sample's calls.

    Calls may run at once. Cancelling one ends its request on the engine and records nothing.
    """

    def __init__(
        self,
        generate: Generate,
        renderer: Renderer,
        limits: SessionLimits,
        reader: AnswerReader | None = None,
        record: SampleRecord | None = None,
        on_replayed: Callable[[Completion], None] | None = None,
    ) -> None:
        """Start without a call; `on_replayed` is called with each answer from the record."""
        self._generate, self._renderer, self._limits = generate, renderer, limits
        self._on_replayed = on_replayed
        self._reader = reader or AnswerReader()
        self._running: set[asyncio.Task[Answered]] = set()
        self.record = record
        """Has every call before it is answered; None: nothing is recorded."""
        self.results = Results(record)
        """What tools answered."""
        self.tree = CallTree()
        self.stored: dict[str, Any] = {}
        """Name -> `StoredResponse`: what later requests of the responses API may name."""
        self.ended = ""
        """Why no call is answered any more; empty while they are."""
        self.truncated = False
        """Whether the last call was refused because the episode has no turn or no room left."""
        self.restarts = 0
        """Calls that begin anew because the template cannot write their messages after an answer."""
        self.overridden = 0
        """Calls with sampling parameters that were not applied."""

    @property
    def renderer(self) -> Renderer:
        """What renders the requests."""
        return self._renderer

    def begin(self, asked: Asked) -> Begun:
        """Find what a request continues, and check it; a refusal changes nothing.

        Raises:
            RequestRefused: the session has ended or reached a limit, the request is too long, or the chat
                template refuses it.
        """
        if self.ended:
            raise ended(self.ended)
        if len(self.tree.calls) + len(self._running) >= self._limits.max_calls:
            raise RequestRefused(
                403, "too_many_calls", f"the session has made its {self._limits.max_calls} calls (max_calls)"
            )
        if len(self._running) >= self._limits.max_running:
            raise RequestRefused(
                429, "too_many_running", f"{len(self._running)} calls of the session run (max_running)"
            )
        begun = self._placed(asked)
        length, most = len(begun.context), self._renderer.max_prompt_tokens
        if 0 < most < length and not self.tree.calls:
            raise invalid(
                f"the request has {length} tokens, over the context length of {most} "
                "(render.max_prompt_tokens)",
                "messages" if asked.dialogue else "prompt",
                "context_length_exceeded",
            )
        if not length:
            raise invalid("the request has no tokens", "messages" if asked.dialogue else "prompt")
        return begun

    async def answer(self, begun: Begun) -> CallAnswer:
        """Generate the answer of a call and record it.

        Raises:
            RequestRefused: the engine failed, the session ended meanwhile, or its episode has no turn or no
                room left.
        """
        number, completion, read = await self._completed(begun)
        text = self._renderer.text(completion.tokens)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        reason = completion.finish_reason
        asked = begun.asked
        also: int | None = None
        if asked.dialogue is None:
            end: int | TextEnd = _ending(begun, text, self._renderer)
        else:
            message = _message(read, begun.context, completion)
            reason = "tool_calls" if read.calls and reason == "stop" else reason
            answered = read_message(message, "answer")
            end = asked.dialogue.answered(answered)
            if read.thoughts:
                del answered["reasoning_content"]
                also = asked.dialogue.answered(answered)
        trained = self.record is None or self.record.is_trained(completion)
        call = ModelCall(begun.parent, begun.inserted, completion, end, also, number, trained)
        self.tree.add(call)
        self.truncated = False
        self.overridden += bool(asked.overridden)
        return CallAnswer(call, len(begun.context), text, message, reason)

    def withdraw(self, begun: Begun, call: ModelCall) -> None:
        """Forget an answer that could not be written; a recorded one is given to who asks the same again."""
        if self.tree.withdraw(call):
            self._put_back(begun, call.number, call.completion)

    def end(self, reason: str) -> None:
        """Answer no call and record no result any more, nor those under way. The first reason counts."""
        self.ended = self.ended or reason
        self.results.end(self.ended)
        for task in self._running:
            task.cancel()

    async def drained(self) -> None:
        """Wait until no call of an ended session runs."""
        while self._running:
            await asyncio.wait(self._running)

    async def _completed(self, begun: Begun) -> Answered:
        try:
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(self._answered_once(begun), name="session.call")
                self._running.add(task)
                task.add_done_callback(self._running.discard)
        except asyncio.CancelledError:
            if not task.cancelled() and task.exception() is None:  # both ended at once
                self._put_back(begun, *task.result()[:2])
            raise
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            if isinstance(first, EpisodeOver):
                self.truncated = True
                raise invalid(str(first), code="episode_over") from None
            if isinstance(first, InvalidRequest):
                raise invalid(str(first)) from None
            if isinstance(first, EngineError | EpisodeError | SettingsError):
                raise RequestRefused(500, "engine_error", str(first)) from None
            raise first from None
        if task.cancelled():
            raise ended(self.ended)
        return task.result()

    async def _answered_once(self, begun: Begun) -> Answered:
        number, completion = await self._recorded(begun)
        asked = begun.asked
        if asked.dialogue is None:
            return number, completion, ReadAnswer("")
        tools = asked.dialogue.tools if asked.tools else ()
        try:
            read = await self._reader.read(self._renderer, completion.tokens, begun.inserted, tools)
        except BaseException:
            self._put_back(begun, number, completion)
            raise
        return number, completion, read

    def _put_back(self, begun: Begun, number: int, completion: Completion) -> None:
        """Keep a recorded answer that was not given, for who asks the same again.

        Not once the session has ended: the record may be of the next attempt by then.
        """
        if self.record is not None and not self.ended:
            self.record.put_back(number, begun.key(), completion)

    async def _recorded(self, begun: Begun) -> tuple[int, Completion]:
        """Answer from the record, or generate and record."""
        if self.record is None:
            return -1, await self._generate_once(begun)
        return await self.record.answer(
            begun.key(),
            -1 if begun.parent is None else begun.parent.number,
            begun.inserted,
            lambda: self._generate_once(begun),
            self._on_replayed,
        )

    async def _generate_once(self, begun: Begun) -> Completion:
        completion = await self._generate(begun.context, begun.asked.max_tokens)
        if completion.experts is not None:
            raise EngineError("a session does not record experts yet: set trainer.routing_replay to false")
        if not completion.tokens:
            raise EngineError("the engine answered without a token")
        return completion

    def _placed(self, asked: Asked) -> Begun:
        """Return what a request continues, and the tokens of the rest."""
        if asked.dialogue is None:
            return self._placed_text(asked)
        parent, count = self.tree.continued(asked.dialogue.keys)
        if parent is not None:
            try:
                tokens = added(self._renderer, asked.dialogue, count, parent.completion.tokens)
                return _begun(asked, parent, tokens)
            except SettingsError:
                self.restarts += 1
        try:
            return _begun(asked, None, whole(self._renderer, asked.dialogue))
        except SettingsError as error:
            raise invalid(str(error), "messages") from None

    def _placed_text(self, asked: Asked) -> Begun:
        if isinstance(asked.prompt, tuple):
            call, length = self.tree.continued_tokens(asked.prompt)
            return Begun(asked, call, asked.prompt[length:], asked.prompt)
        parent, rest = self.tree.continued_text(asked.prompt)
        return _begun(asked, parent, self._renderer.encode(rest, special=parent is None))


def _begun(asked: Asked, parent: ModelCall | None, inserted: tuple[int, ...]) -> Begun:
    return Begun(asked, parent, inserted, context_tokens(parent, inserted))


def _ending(begun: Begun, text: str, renderer: Renderer) -> TextEnd:
    """Return the end of prompt and answer, with which a prompt begins that continues them."""
    prompt = begun.asked.prompt
    return text_end((prompt if isinstance(prompt, str) else renderer.text(prompt)) + text)


def _message(read: ReadAnswer, context: tuple[int, ...], completion: Completion) -> dict[str, Any]:
    """Return the message of an answer; the ids of its calls follow from the tokens."""
    message: dict[str, Any] = {"role": "assistant", "content": read.content}
    if read.thoughts:
        message["reasoning_content"] = read.thoughts
    calls = [
        {
            "id": _call_id(i, context, completion.tokens),
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for i, (name, arguments) in enumerate(read.calls)
    ]
    return {**message, "content": read.content or None, "tool_calls": calls} if calls else message


def _call_id(index: int, context: tuple[int, ...], sampled: tuple[int, ...]) -> str:
    """Return nine letters and digits, which every template takes."""
    numbers = np.array((index, len(context), *context, *sampled), dtype=np.int64)
    return xxhash.xxh3_64_hexdigest(numbers.tobytes())[:9]

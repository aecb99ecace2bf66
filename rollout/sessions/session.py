"""Runs the calls of one session on the engine, and records them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Annotated, Any

from annotated_types import Interval

from protocol.errors import EngineError, EpisodeError, InvalidRequest, SettingsError
from rollout.engines.base import Completion
from rollout.off_loop import LARGE, TOKEN, off_loop
from rollout.render import PromptTooLong, Renderer, checked_length
from rollout.sample import EpisodeOver, Generate
from rollout.sessions.answers.content import AnswerContent, answer_content
from rollout.sessions.answers.reader import AnswerReader
from rollout.sessions.calls import CallTree, ModelCall, context_tokens
from rollout.sessions.record import SampleRecord, key_of
from rollout.sessions.refusal import RequestRefused, ended, invalid
from rollout.sessions.requests import HarnessRequest, read_body
from rollout.sessions.results import Results
from rollout.sessions.sampling import RequestSampling, SamplingRules
from rollout.sessions.template import dialogue_tokens, new_tokens

GenerateAs = Callable[[tuple[int, ...], int | None, RequestSampling], Awaitable[Completion]]
"""Generates a completion like `Generate`, with sampling parameters of the request."""
OTHER_BYTES = 1 << 16
"""Bytes of a body outside its texts. In texts, a character takes at most 12 bytes (two escapes)."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of one session."""

    max_calls: Annotated[int, Interval(ge=1, le=10**4)] = 256
    """Maximum answered calls; at most the number that a sample may record."""
    max_running: Annotated[int, Interval(ge=1, le=10**5)] = 64
    """Maximum concurrent calls."""


@dataclass(frozen=True, slots=True)
class PendingCall:
    """Validated call without an answer."""

    request: HarnessRequest
    parent: ModelCall | None
    inserted: tuple[int, ...]
    """As in `ModelCall`."""
    context: tuple[int, ...]
    """Tokens before the answer."""
    key: tuple[str, str]
    """Lookup key of the call in a record."""
    restarts: bool = False
    """Whether the call has no parent because the template cannot append its messages to an answer."""


NumberedAnswer = tuple[int, Completion, AnswerContent]
"""(number in the record or -1, completion, content)."""


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """Answer to a call, in the form sent to the client."""

    call: ModelCall
    prompt_tokens: int
    text: str
    """Text of a completion answer."""
    message: dict[str, Any]
    """Message in chat API format."""
    finish_reason: str
    """"stop", "length" or "tool_calls"."""
    stopped_by: str = ""
    """Stop string of the request that ended the answer."""
    others: tuple["CallAnswer", ...] = ()
    """Further answers to the same request."""


class Session:
    """Model calls of one sample.

    Calls may run concurrently. Cancelling a call aborts its engine request, and the call is not recorded.
    """

    def __init__(
        self,
        generate: Generate,
        renderer: Renderer,
        limits: SessionLimits,
        reader: AnswerReader | None = None,
        record: SampleRecord | None = None,
        on_replayed: Callable[[Completion], None] | None = None,
        max_model_len: int = 0,
        rules: SamplingRules | None = None,
        generate_as: GenerateAs | None = None,
    ) -> None:
        """Start with no calls.

        Args:
            generate, renderer, limits, reader, record: as the attributes of the same name.
            on_replayed: callback for each answer from the record.
            max_model_len: limit on context plus answer, tokens; 0: unknown.
            rules: handling of sampling parameters in requests; None: refuse all.
            generate_as: generates with request parameters; required if `rules` allows them.
        """
        self._generate, self._renderer, self._limits = generate, renderer, limits
        self._on_replayed = on_replayed
        self._reader = reader or AnswerReader()
        self._max_model_len = max_model_len
        self._generate_as = generate_as
        self.rules = rules or SamplingRules()
        """Handling of sampling parameters in requests."""
        self._running: set[asyncio.Task[NumberedAnswer]] = set()
        self._reading = 0
        """Number of large requests being read or queued; one is read at a time."""
        self._read_lock = asyncio.Lock()
        self.record = record
        """Record that stores each call before it is answered; None: calls are not recorded."""
        self.results = Results(record)
        """Tool results."""
        self.tree = CallTree()
        self.stored: dict[str, Any] = {}
        """Name -> `StoredResponse` that later requests of the responses API may continue."""
        self.ended = ""
        """Why no further call is answered; empty while the session is open."""
        self.truncated = False
        """Whether the last call was refused because the episode has no turn or no tokens left."""
        self.restarts = 0
        """Number of calls without a parent because the template cannot append their messages to an answer."""
        self.overridden = 0
        """Number of calls with sampling parameters that were ignored."""

    @property
    def renderer(self) -> Renderer:
        """Renderer of the requests."""
        return self._renderer

    async def read(self, body: bytes, parse: Callable[[Any], HarnessRequest]) -> PendingCall:
        """Parse a request and begin the call; large requests are parsed in a thread.

        A refusal changes no state.

        Args:
            parse: converts the decoded body to a request.

        Raises:
            RequestRefused: see `begin`; or the request is malformed.
        """
        self._check_capacity()
        min_tokens = (len(body) - OTHER_BYTES) // (12 * self._renderer.longest_piece)
        if 0 < self._max_model_len < min_tokens:
            raise self._too_long(f"at least {min_tokens} tokens")

        def parsed() -> PendingCall:
            content = read_body(body, self._max_model_len)
            return self._checked_call(parse(content))

        if len(body) <= LARGE:
            return parsed()
        self._reading += 1
        try:
            async with self._read_lock:
                pending = await off_loop(len(body), parsed)
        finally:
            self._reading -= 1
        self._check_capacity()
        return pending

    def begin(self, request: HarnessRequest) -> PendingCall:
        """Validate a request and find the call that it continues. A refusal changes no state.

        Raises:
            RequestRefused: the session has ended or reached a limit, the request is too long, or the chat
                template rejects it.
        """
        self._check_capacity()
        return self._checked_call(request)

    def _checked_call(self, request: HarnessRequest) -> PendingCall:
        """Return the pending call of a request after checking its length. May run in a thread."""
        param = "messages" if request.dialogue else "prompt"
        limit = self._max_model_len if self.tree.calls else self._renderer.max_prompt_tokens
        try:
            pending = self._place_call(request, limit)
            if not self.tree.calls:
                checked_length(pending.context, limit)
        except PromptTooLong as error:
            raise self._too_long(str(error), param) from None
        if not pending.context:
            raise invalid("the request has no tokens", param)
        return pending

    def _check_capacity(self, new_calls: int = 1) -> None:
        """Raise RequestRefused if the session cannot accept `new_calls` calls now."""
        if self.ended:
            raise ended(self.ended)
        if len(self.tree.calls) + len(self._running) + new_calls > self._limits.max_calls:
            raise RequestRefused(
                403, "too_many_calls", f"the session has made its {self._limits.max_calls} calls (max_calls)"
            )
        if len(self._running) + self._reading + new_calls > self._limits.max_running:
            raise RequestRefused(
                429, "too_many_running", f"{self._limits.max_running} calls of the session run (max_running)"
            )

    def _too_long(self, tokens: str, param: str | None = None) -> RequestRefused:
        """Return the refusal of a too long request; after the first call, mark the sample as truncated."""
        if not self.tree.calls:
            limit = self._renderer.max_prompt_tokens or self._max_model_len
            return invalid(
                f"the request has {tokens}, over the context length of {limit} (render.max_prompt_tokens)",
                param,
                "context_length_exceeded",
            )
        self.truncated = True
        return invalid(f"{tokens} fill engine.max_model_len {self._max_model_len}", code="episode_over")

    async def answer(self, pending: PendingCall) -> CallAnswer:
        """Generate the answers to a call and record them.

        Raises:
            RequestRefused: the engine failed, the session ended meanwhile, or the episode has no turn or no
                tokens left.
        """
        request, own = pending.request, pending.request.sampling
        requests = [replace(request, sampling=each) for each in own.answers()] if own else [request]
        first, *others = await self._complete_all([replace(pending, request=each) for each in requests])
        self.truncated = False
        self.overridden += bool(pending.request.overridden)
        self.restarts += pending.restarts
        answer = self._add_answer(pending, first)
        return replace(answer, others=tuple(self._add_answer(pending, other) for other in others))

    def _add_answer(self, pending: PendingCall, answer: NumberedAnswer) -> CallAnswer:
        """Add an answer to the tree; an answer with the request's own sampling parameters is context."""
        number, completion, content = answer
        reason = "stop" if content.stopped_by else completion.finish_reason
        reason = "tool_calls" if content.message.get("tool_calls") and reason == "stop" else reason
        has_own_sampling = pending.request.sampling is not None
        trained = not has_own_sampling and (self.record is None or self.record.is_trained(completion))
        call = ModelCall(
            pending.parent, pending.inserted, completion, content.end, content.also, number, trained,
            has_own_sampling,
        )  # fmt: skip
        self.tree.add(call)
        context = len(pending.context)
        return CallAnswer(call, context, content.text, content.message, reason, content.stopped_by)

    def withdraw(self, pending: PendingCall, answer: CallAnswer) -> None:
        """Remove answers that could not be delivered. Recorded answers are kept for a repeated request."""
        for each in (answer, *answer.others):
            if self.tree.withdraw(each.call):
                self._put_back(pending, each.call.number, each.call.completion)

    def end(self, reason: str) -> None:
        """Refuse further calls and results, and cancel running ones. The first reason is kept."""
        self.ended = self.ended or reason
        self.results.end(self.ended)
        for task in self._running:
            task.cancel()

    async def drained(self) -> None:
        """Wait until no call of an ended session runs."""
        while self._running:
            await asyncio.wait(self._running)

    async def _complete_all(self, pending: list[PendingCall]) -> list[NumberedAnswer]:
        """Return the answers in call number order, as in a replay; if one fails, return none."""
        if len(pending) == 1:
            return [await self._complete(pending[0])]
        self._check_capacity(len(pending))
        tasks: list[asyncio.Task[NumberedAnswer]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for index, each in enumerate(pending):
                    tasks.append(group.create_task(self._complete(each), name=f"session.answer-{index}"))
        except BaseException as failed:
            for task in tasks:
                if not task.cancelled() and task.exception() is None:
                    self._put_back(pending[0], *task.result()[:2])
            raise (failed.exceptions[0] if isinstance(failed, BaseExceptionGroup) else failed) from None
        return sorted((task.result() for task in tasks), key=itemgetter(0))

    async def _complete(self, pending: PendingCall) -> NumberedAnswer:
        try:
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(self._complete_once(pending), name="session.call")
                self._running.add(task)
                task.add_done_callback(self._running.discard)
        except asyncio.CancelledError:
            if not task.cancelled() and task.exception() is None:  # answer and cancellation coincided
                self._put_back(pending, *task.result()[:2])
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

    async def _complete_once(self, pending: PendingCall) -> NumberedAnswer:
        number, completion = await self._recorded(pending)
        dialogue = pending.request.dialogue
        tools = dialogue.tools if dialogue is not None and pending.request.tools else ()
        try:
            read = None
            if dialogue is not None:
                read = await self._reader.read(self._renderer, completion.tokens, pending.inserted, tools)
            size = TOKEN * (len(pending.context) + len(completion.tokens))
            about = pending.request, pending.context, completion.tokens, read, self._renderer
            content = await off_loop(size, lambda: answer_content(*about))
        except BaseException:
            self._put_back(pending, number, completion)
            raise
        return number, completion, content

    def _put_back(self, pending: PendingCall, number: int, completion: Completion) -> None:
        """Keep a recorded but undelivered answer for a repeated request.

        After the end of the session the answer is dropped: the record may belong to the next attempt.
        """
        if self.record is not None and not self.ended:
            self.record.put_back(number, pending.key, completion)

    async def _recorded(self, pending: PendingCall) -> tuple[int, Completion]:
        """Answer from the record, or generate and record."""
        if self.record is None:
            return -1, await self._generate_once(pending)
        return await self.record.answer(
            pending.key,
            -1 if pending.parent is None else pending.parent.number,
            pending.inserted,
            lambda: self._generate_once(pending),
            self._on_replayed,
            _own_sampling(pending.request),
        )

    async def _generate_once(self, pending: PendingCall) -> Completion:
        limit, own = pending.request.max_tokens, pending.request.sampling
        if own is None:
            completion = await self._generate(pending.context, limit)
        else:
            assert self._generate_as is not None  # rules that allow parameters require it
            completion = await self._generate_as(pending.context, limit, own)
        if completion.experts is not None:
            raise EngineError("a session does not record experts yet: set trainer.routing_replay to false")
        if not completion.tokens:
            raise EngineError("the engine answered without a token")
        return completion

    def _place_call(self, request: HarnessRequest, limit: int) -> PendingCall:
        """Return the call that continues the request's parent. Raises PromptTooLong."""
        if request.dialogue is None:
            return self._place_text_call(request, limit)
        parent, count = self.tree.continued(request.dialogue.keys)
        if parent is not None:
            try:
                tokens = new_tokens(self._renderer, request.dialogue, count, parent.completion.tokens, limit)
                return _pending_call(request, parent, tokens)
            except PromptTooLong:
                raise
            except SettingsError:
                pass  # start a row without parent
        try:
            tokens = dialogue_tokens(self._renderer, request.dialogue, limit)
        except PromptTooLong:
            raise
        except SettingsError as error:
            raise invalid(str(error), "messages") from None
        return _pending_call(request, None, tokens, restarts=parent is not None)

    def _place_text_call(self, request: HarnessRequest, limit: int) -> PendingCall:
        if isinstance(request.prompt, tuple):
            call, length = self.tree.continued_tokens(request.prompt)
            return _pending_call(request, call, request.prompt[length:])
        parent, rest = self.tree.continued_text(request.prompt)
        tokens = self._renderer.encode(rest, special=parent is None, max_tokens=limit)
        return _pending_call(request, parent, tokens)


def _pending_call(
    request: HarnessRequest, parent: ModelCall | None, inserted: tuple[int, ...], restarts: bool = False
) -> PendingCall:
    context = context_tokens(parent, inserted)
    latest = request.prompt if request.dialogue is None else request.dialogue.keys[-1]
    own = _own_sampling(request)
    key = key_of(f"{latest!r} {request.max_tokens} {request.tools}{own and f' {own}'}", context)
    return PendingCall(request, parent, inserted, context, key, restarts)


def _own_sampling(request: HarnessRequest) -> str:
    return "" if request.sampling is None else request.sampling.as_json()

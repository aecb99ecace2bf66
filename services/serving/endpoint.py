"""Answers clients of the OpenAI API with an engine, without sessions: requests are independent.

GET  /health
GET  /v1/models
POST /v1/chat/completions
POST /v1/completions
POST /v1/messages
POST /inference/v1/generate
"""

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from protocol.errors import InvalidRequest
from rollout.config import EnvironmentConfig
from rollout.engines.base import Completion, Engine, Sampling
from rollout.render import Renderer
from rollout.sessions.answers.reader import AnswerReader
from rollout.sessions.endpoint import ApiServer, has_api_key, listed_model
from rollout.sessions.model_calls import ModelCalls
from rollout.sessions.refusal import RequestRefused
from rollout.sessions.requests import HarnessRequest
from rollout.sessions.sampling import MAX_ANSWERS, RequestSampling, SamplingRules
from rollout.sessions.served_call import APIS
from rollout.sessions.session import Session, SessionLimits
from services.observability.http import names_loopback

NO_VERSION = (
    "the run has no published version: it has made none yet, or it is over; its newest export is served "
    "without --follow"
)
LIMITS = SessionLimits(max_calls=MAX_ANSWERS, max_running=MAX_ANSWERS)


class Generation:
    """Continues the tokens of one request (`Generate`), up to its own limit or the end of the context."""

    def __init__(
        self,
        engine: Engine,
        sampling: Sampling,
        config: EnvironmentConfig,
        max_model_len: int,
        renderer: Renderer,
    ) -> None:
        self._engine, self._sampling, self._config = engine, sampling, config
        self._max_model_len, self._renderer = max_model_len, renderer
        self._name, self._numbers = secrets.token_hex(8), itertools.count()
        self.adapter = ""
        """Adapter named by the request; set before the first call."""

    async def __call__(
        self, tokens: tuple[int, ...], max_tokens: int | None, own: RequestSampling | None = None
    ) -> Completion:
        room = self._max_model_len - len(tokens)
        if room < 1:
            raise InvalidRequest(f"{len(tokens)} tokens fill engine.max_model_len {self._max_model_len}")
        calls = ModelCalls(
            self._engine,
            replace(self._sampling, max_tokens=room),
            self._config,
            self._max_model_len,
            f"{self._name}.{next(self._numbers)}",
            renderer=self._renderer,
            adapter=self.adapter,
        )
        return await calls(tokens, max_tokens, own)


class GenerationEndpoint(ApiServer):
    """HTTP server of one engine. Requests choose their sampling parameters, since no data is trained on."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        reader: AnswerReader,
        config: EnvironmentConfig,
        *,
        model: str,
        sampling: Sampling,
        max_model_len: int,
        key: str = "",
        follows: bool = False,
        body_mb: int = 16,
        adapters: Sequence[str] = (),
    ) -> None:
        """Create a server without starting it.

        Args:
            engine: started engine.
            renderer: renderer with the chat template; its `max_prompt_tokens` is below `max_model_len`.
            reader: parser of tool calls and reasoning in answers.
            config: section `[environment]`: address, certificate, `call_s`.
            model: listed name of the model.
            sampling: sampling parameters of requests without their own.
            max_model_len: maximum number of tokens of a context with its answer.
            key: API key of clients; empty: only clients on this machine, with any key.
            follows: whether requests are refused until a version is committed.
            body_mb: as for `ApiServer`.
            adapters: names of the engine's adapters, which clients use as models.
        """
        apis = [api for api in APIS if api.keep is None]
        super().__init__(config, model=model, apis=apis, body_mb=body_mb)
        self._engine, self._renderer, self._reader = engine, renderer, reader
        self._sampling, self._max_model_len = sampling, max_model_len
        self._adapters = tuple(adapters)
        self._generations: WeakKeyDictionary[Session, Generation] = WeakKeyDictionary()
        self._key, self._follows = key, follows
        self._rules = SamplingRules("context", sampling, renderer.stop_strings, engine.capabilities.seeds)
        self._router.add_get("/health", self._serve_health)

    @property
    def url(self) -> str:
        """Base URL for clients of the OpenAI API."""
        return f"{self._address}/v1"

    def session_of(self, request: web.Request) -> Session:
        """Return a new session: requests are independent."""
        self._check_client(request)
        if not self._is_ready:
            raise RequestRefused(503, "no_version", NO_VERSION)
        config, most = self._config, self._max_model_len
        generation = Generation(self._engine, self._sampling, config, most, self._renderer)
        session = Session(
            generation,
            self._renderer,
            LIMITS,
            self._reader,
            max_model_len=most,
            rules=self._rules,
            generate_as=generation,
        )
        self._generations[session] = generation
        return session

    def models(self, request: web.Request) -> list[dict[str, Any]]:
        self._check_client(request)
        version = self._engine.served.version
        listed = {**listed_model(self._model), "version": None if version < 0 else version}
        return [listed, *({**listed_model(name), "parent": self._model} for name in self._adapters)]

    def admit(self, session: Session, parsed: HarnessRequest) -> None:
        """Select the adapter that a request names; refuse requests for unknown models."""
        if parsed.model in self._adapters:
            self._generations[session].adapter = parsed.model
        elif parsed.model != self._model:
            known = ", ".join((self._model, *self._adapters))
            raise RequestRefused(
                404,
                "model_not_found",
                f"there is no model {parsed.model!r}; there {'are' if self._adapters else 'is'} {known}",
                "model",
            )

    @property
    def _is_ready(self) -> bool:
        return not self._follows or self._engine.served.version >= 0

    def _check_client(self, request: web.Request) -> None:
        """Refuse clients without the key; without a key, refuse host names other than loopback."""
        if self._key and not has_api_key(request, self._key):
            raise RequestRefused(401, "invalid_api_key", "the API key is not the server's")
        if not self._key and not names_loopback(request):
            raise RequestRefused(403, "not_loopback", "without a key, name the server 127.0.0.1 or localhost")

    async def _serve_health(self, request: web.Request) -> web.Response:
        """Answer whether requests are served; requires no key and reveals no text."""
        await self._engine.check()
        served = self._engine.served
        body = {"ok": self._is_ready, "epoch": served.epoch, "version": served.version}
        return web.json_response(body, status=200 if self._is_ready else 503)

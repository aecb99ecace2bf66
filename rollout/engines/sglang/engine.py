"""Serves with SGLang, whose server is a child process with `plugin.py` in its schedulers.

Requests go to the server over HTTP on loopback, tokens in and tokens out. Weights are staged next to the live
ones during decoding, and committed between two steps on all ranks. This process does not need SGLang:
`engine.python` names the interpreter that has it.
"""

import asyncio
import base64
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from protocol.errors import EngineError, EngineSettingsError
from protocol.messages import WeightManifest
from protocol.weights.lora import NO_ADAPTERS, LoraConfig, adapter_shapes, adapter_targets
from rollout.engines.base import Completion, EngineConfig, KvPolicy, Request, Sampling
from rollout.engines.multi_process.engine import MultiProcessEngine
from rollout.engines.multi_process.rank_rpc import RankRpcClient, socket_path, start_error
from rollout.engines.multi_process.routed_experts import Mixture, recorded_experts
from rollout.engines.named_adapters import covering, named_tensors
from rollout.engines.requests import spans_of
from rollout.engines.sglang.launch import SglangServer, check_model
from rollout.engines.sglang.lora import NAME
from rollout.engines.sglang.plugin import RankSettings
from rollout.engines.sglang.sampling import VERSIONS

ABORT_S = 5.0
"""Seconds during which an abort is repeated: an abort that overtakes its request in SGLang's queues is lost.
"""
ABORT_INTERVAL_S = 0.05
"""Seconds between repeated aborts."""


class SglangEngine(MultiProcessEngine):
    """Engine with one server; TP ranks commit at the same step, and no other parallelism is used."""

    def __init__(
        self,
        config: EngineConfig,
        model_dir: Path,
        incarnation: str,
        lora: LoraConfig = NO_ADAPTERS,
        named: Mapping[str, Path] | None = None,
    ) -> None:
        """Create an engine that is not started; arguments: see `MultiProcessEngine`."""
        self._server = SglangServer(config, model_dir, incarnation)
        self._ranks = RankRpcClient(incarnation, on_lost=self._server.give_up)
        super().__init__(
            config,
            model_dir,
            incarnation,
            lora,
            named,
            call=self._ranks.call,
            call_anytime=self._ranks.call,
            no_seeds="engine sglang does not support seeds of single requests",
        )
        self._adapters: dict[str, str] = {}
        """Adapter name -> SGLang's name; "" is the adapter in versions, if any."""
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._http = new_session(self._server.key)
        ready = False
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                named = await asyncio.to_thread(named_tensors, self._named, self._model_dir)
                self._lora = covering(config for config, _ in named.values()) if named else self._lora
                model = await asyncio.to_thread(check_model, self._config, self._model_dir, self._lora)
                # use plain numbers as names: SGLang treats some characters specially
                numbers = {name: str(number) for number, name in enumerate(named)}
                await self._server.start(
                    self._http, self._lora, {numbers[name]: adapter for name, adapter in named.items()}
                )
                self._adapters = {"": NAME, **numbers} if self._lora.rank else {}
                await self._install(model)
                # the first step allocates and compiles
                await self._complete(Request("warm-up", (0,), Sampling(max_tokens=2)), "warm-up:")
            ready = True
        except TimeoutError:
            raise EngineError(
                f"engine {self._name}: SGLang not ready within {self._config.start_timeout_s:g} s: "
                f"{self._server.log_tail()}"
            ) from None
        finally:
            if not ready:
                await self.close()

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._gate.abort(request_ids)
        names = {self._running[i] for i in request_ids if i in self._running}
        with suppress(TimeoutError):
            async with asyncio.timeout(ABORT_S):
                while names:
                    # bypass the server's process, which may lag behind the scheduler
                    await self._call("abort", sorted(names))
                    await asyncio.sleep(ABORT_INTERVAL_S)
                    names &= set(self._running.values())

    async def pause(self) -> None:
        await self.check()
        async with self._updating:
            await self._call("pause")

    async def resume(self) -> None:
        await self.check()
        async with self._updating:
            await self._call("resume")

    async def commit(self, manifest: WeightManifest) -> float:
        async with self._committing(manifest):
            with self._weights.commit(manifest):
                ranks = await self._staging.commit(manifest)
        return max(rank.copy_ms for rank in ranks)

    async def sleep(self) -> None:
        await self._release_memory(self._staging.sleep)

    async def check(self) -> None:
        await super().check()
        if self._http is None:
            raise EngineError(f"engine {self._name} is not started")
        self._server.check()

    async def close(self) -> None:
        self._closed = True
        self._gate.notify()
        self._ranks.close()
        await self._server.stop()
        if self._http is not None:
            await self._http.close()

    async def _install(self, model: dict[str, Any]) -> None:
        """Connect to the ranks and install the extension in them."""
        paths = [
            socket_path(self._server.directory, rank) for rank in range(self._config.tensor_parallel_size)
        ]
        if not all(path.exists() for path in paths):
            raise EngineSettingsError(
                f"engine {self._name}: SGLang did not load tether's plug-in, which it finds by PYTHONPATH;"
                f" the interpreter engine.python must keep this variable: {self._server.log_tail()}"
            )
        await self._ranks.connect(paths)
        shapes = await self._read_model(model)
        if self._lora.rank:
            shapes = adapter_shapes(adapter_targets(shapes, self._lora), self._lora.rank)
        settings = RankSettings(
            architecture=next(iter(model.get("architectures") or ()), ""),
            adapter=bool(self._lora.rank),
            recompute=self._config.kv is KvPolicy.RECOMPUTE,
            sleeps=self._config.enable_sleep_mode,
            staging=self._config.staging,
            staging_mb=self._config.staging_mb,
        )
        try:
            ranks = await self._call("install", shapes, msgspec.to_builtins(settings))
            await self._staging.divide([rank["unplaced"] for rank in ranks])
        except EngineError as error:
            kind = start_error(str(error))
            raise kind(f"{self._model_dir} cannot be updated in place: {error}") from error

    async def _complete(self, request: Request, name: str) -> dict[str, Any]:
        """Return SGLang's response to /generate."""
        sampling = request.sampling
        body = {
            "rid": name,
            "input_ids": list(request.prompt),
            "return_logprob": True,
            "return_routed_experts": self._mixture is not None,
            "lora_path": self._adapters.get(request.adapter),
            "sampling_params": {
                "max_new_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "stop_token_ids": list(sampling.stop_token_ids),
            },
        }
        try:
            return await self._post(body)
        except EngineError as error:
            raise EngineError(f"request {request.id}: {error}") from error
        except asyncio.CancelledError:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(ABORT_S):
                    await self._call("abort", [name])
            raise

    async def _completion(self, request: Request, name: str, answer: Any) -> Completion:
        return completion_of(request, answer, self._mixture)

    async def _post(self, body: dict[str, Any]) -> Any:
        """Send a request to the server's /generate and return its response.

        Raises:
            EngineError: the server returned an error or does not respond.
        """
        if self._http is None:
            raise EngineError(f"engine {self._name} is not started")
        try:
            async with self._http.post(f"{self._server.url}/generate", json=body) as response:
                answer = await response.read()
                if response.status != 200:
                    reason = answer[:500].decode(errors="replace")
                    raise EngineError(f"SGLang answers with status {response.status}: {reason}")
        except (aiohttp.ClientError, RuntimeError) as error:
            self._server.give_up()  # sockets close before the process exit is visible
            raise EngineError(f"SGLang's server does not answer: {error!r}") from error
        return msgspec.json.decode(answer) if answer else None


def new_session(key: str) -> aiohttp.ClientSession:
    """Create an HTTP session for a server with this API key.

    The session has no limits: the engine bounds the number of requests, and a request may take any time.
    """
    return aiohttp.ClientSession(
        # no keep-alive: the server closes idle connections after seconds, possibly while a request is being
        # sent
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"Authorization": f"Bearer {key}"},
    )


def completion_of(request: Request, answer: dict[str, Any], mixture: Mixture | None = None) -> Completion:
    """Decode SGLang's response to /generate.

    Args:
        mixture: expert layout of the model; None: experts are not recorded.

    Raises:
        EngineError: log-probabilities or versions of a token are missing, or experts are missing.
    """
    tokens, meta = tuple(answer["output_ids"]), answer["meta_info"]
    logprobs = tuple(float(row[0]) for row in meta.get("output_token_logprobs") or ())
    versions = meta.get(VERSIONS) or ()
    if not len(tokens) == len(logprobs) == len(versions) or None in versions:
        raise EngineError(
            f"request {request.id}: {len(tokens)} tokens, {len(logprobs)} log-probabilities, "
            f"versions {versions}"
        )
    # SGLang decodes top_k 1 as greedy: the only token has probability 1
    if request.sampling.temperature and request.sampling.top_k == 1:
        logprobs = (0.0,) * len(tokens)
    reason = str(meta["finish_reason"]["type"])
    # SGLang checks the length before stop tokens: the last token may be a stop token
    if reason == "length" and tokens and tokens[-1] in request.sampling.stop_token_ids:
        reason = "stop"
    # a requeued request is counted again when it continues, including its own tokens
    cached = min(int(meta.get("cached_tokens") or 0), len(request.prompt))
    if mixture is None or not tokens:
        return Completion(tokens, logprobs, spans_of(versions), reason, None, cached)
    inputs = len(request.prompt) + len(tokens) - 1
    found = base64.b64decode(meta.get("routed_experts") or "")
    experts = recorded_experts(request.id, mixture.rows(found), mixture, inputs, aborted=reason == "abort")
    return Completion(tokens, logprobs, spans_of(versions), reason, experts, cached)

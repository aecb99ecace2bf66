"""SGLang behind our interface: its server is a child process, our part in it is `sglang_plugin.py`.

Requests go to the server over HTTP on loopback, tokens in and tokens out. Weights are staged beside the live
ones while requests are decoded and committed between two steps on all ranks. Needs no SGLang in this process:
`engine.python` names the interpreter that has it.
"""

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from protocol.device.checkpoint_shapes import checkpoint_shapes
from protocol.errors import EngineError, Unsupported
from protocol.messages import WeightManifest
from protocol.weights.lora import NO_ADAPTERS, LoraConfig, adapter_shapes, adapter_targets
from rollout.engines.base import Capabilities, Completion, EngineConfig, KvPolicy, Request, Sampling
from rollout.engines.multi_process.engine import ABORTED, CALL_TIMEOUT_S, MultiProcessEngine
from rollout.engines.multi_process.rank_rpc import RankRpcClient, socket_path
from rollout.engines.requests import check_request
from rollout.engines.sglang.launch import SglangServer, check_model
from rollout.engines.sglang.lora import NAME
from rollout.engines.sglang.plugin import RankSettings
from rollout.engines.sglang.sampling import VERSIONS
from rollout.weights.registry import RECEIVERS

ABORT_S = 5.0
"""How long an abort is repeated: one that overtakes its request in SGLang's own queues is lost."""
ABORT_AGAIN_S = 0.05


class SglangEngine(MultiProcessEngine):
    """One server. TP ranks commit at the same step; pipeline and data parallelism are not used."""

    def __init__(
        self, config: EngineConfig, model_dir: Path, incarnation: str, lora: LoraConfig = NO_ADAPTERS
    ) -> None:
        super().__init__(config, model_dir, incarnation)
        self.capabilities = Capabilities(
            seeds=False, transports=frozenset(RECEIVERS), lora=True, sleep=config.enable_sleep_mode
        )
        self._lora = lora
        self._vocab = 0
        # none of the ids that SGLang knows is the beginning of another: it aborts by prefix
        self._numbers = itertools.count()
        self._server = SglangServer(config, model_dir, incarnation, lora)
        self._ranks = RankRpcClient(on_lost=self._server.kill)
        self._http: aiohttp.ClientSession | None = None
        self._closed = False

    async def start(self) -> None:
        self._http = new_session(self._server.key)
        ready = False
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                model = await asyncio.to_thread(check_model, self._config, self._model_dir, self._lora)
                await self._server.start(self._http)
                await self._install(model)
                # the first step allocates and compiles
                await self._complete(Request("warm-up", (0,), Sampling(max_tokens=2)), "warm-up:")
            ready = True
        except TimeoutError:
            raise EngineError(
                f"engine {self._name}: SGLang not ready within {self._config.start_timeout_s:g} s: {self._server.last_words()}"
            ) from None
        finally:
            if not ready:
                await self.close()

    async def generate(self, request: Request) -> Completion:
        await self.check()
        check_request(
            request, vocab_size=self._vocab, max_model_len=self._config.max_model_len, running=self._running
        )
        if request.sampling.seed is not None:
            raise Unsupported(f"request {request.id}: engine sglang has no seeds of single requests")
        self._running[request.id] = name = f"{next(self._numbers)}:{request.id}"
        try:
            if not await self._admitted(request.id):
                return ABORTED
            answer = await self._complete(request, name)
        except asyncio.CancelledError:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(ABORT_S):
                    await self._call("abort", [name])
            raise
        finally:
            del self._running[request.id]
        await self.check()
        return completion_of(request, answer)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._abort_waiting(request_ids)
        names = {self._running[i] for i in request_ids if i in self._running}
        with suppress(TimeoutError):
            async with asyncio.timeout(ABORT_S):
                while names:
                    await self._call(
                        "abort", sorted(names)
                    )  # past the server's process, which may lag behind the scheduler
                    await asyncio.sleep(ABORT_AGAIN_S)
                    names &= set(self._running.values())

    async def pause(self) -> None:
        await self.check()
        async with self._updating:
            await self._call("pause")

    async def resume(self) -> None:
        await self.check()
        async with self._updating:
            await self._call("resume")

    async def check(self) -> None:
        if self._poisoned:
            raise EngineError(f"engine {self._name} is poisoned: {self._poisoned}")
        if self._http is None or self._closed:
            raise EngineError(f"engine {self._name} is {'closed' if self._closed else 'not started'}")
        self._server.check()

    async def close(self) -> None:
        self._closed = True
        self._wake_waiting()
        self._ranks.close()
        await self._server.stop()
        if self._http is not None:
            await self._http.close()

    async def _install(self, model: dict[str, Any]) -> None:
        self._vocab = int(model.get("vocab_size") or 0)
        paths = [
            socket_path(self._server.directory, rank) for rank in range(self._config.tensor_parallel_size)
        ]
        if not all(path.exists() for path in paths):
            raise EngineError(
                f"engine {self._name}: SGLang did not load tether's plug-in: {self._server.last_words()}"
            )
        await self._ranks.connect(paths)
        shapes = await asyncio.to_thread(checkpoint_shapes, self._model_dir)
        if self._lora.rank:
            whole = {name: tuple(shape) for name, shape in shapes.items()}
            shapes = {
                name: list(shape)
                for name, shape in adapter_shapes(adapter_targets(whole, self._lora), self._lora.rank).items()
            }
        terms = RankSettings(
            architecture=next(iter(model.get("architectures") or ()), ""),
            adapter=bool(self._lora.rank),
            recompute=self._config.kv is KvPolicy.RECOMPUTE,
            sleeps=self._config.enable_sleep_mode,
            staging_mb=self._config.staging_mb,
        )
        try:
            await self._call("install", shapes, msgspec.to_builtins(terms))
        except EngineError as error:
            raise EngineError(f"{self._model_dir} cannot be updated in place: {error}") from error

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of all ranks, given between two steps."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await self._ranks.call(method, *arguments)
        except TimeoutError:
            raise EngineError(
                f"engine {self._name}: no answer to {method} within {CALL_TIMEOUT_S:g} s"
            ) from None
        except EngineError as error:
            raise EngineError(f"engine {self._name}: {error}") from error

    async def _complete(self, request: Request, name: str) -> dict[str, Any]:
        sampling = request.sampling
        body = {
            "rid": name,
            "input_ids": list(request.prompt),
            "extra_key": f"{self._served.epoch}/{self._served.version}/{self._changes}",
            "return_logprob": True,
            "lora_path": NAME if self._lora.rank else None,
            "sampling_params": {
                "max_new_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "stop_token_ids": list(sampling.stop_token_ids),
            },
        }
        try:
            return await self._post("generate", body)
        except EngineError as error:
            raise EngineError(f"request {request.id}: {error}") from error

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        """A request to the server. Raises EngineError with its words, or if it is gone."""
        if self._http is None:
            raise EngineError(f"engine {self._name} is not started")
        try:
            async with self._http.post(f"{self._server.url}/{path}", json=body) as response:
                answer = await response.read()
                if response.status != 200:
                    raise EngineError(
                        f"SGLang refuses with {response.status}: {answer[:500].decode(errors='replace')}"
                    )
        except (aiohttp.ClientError, RuntimeError) as error:
            raise EngineError(f"SGLang's server does not answer: {error!r}") from error
        return msgspec.json.decode(answer) if answer else None

    async def _commit(self, manifest: WeightManifest) -> float:
        return float(max(rank["copy_ms"] for rank in await self._apply(manifest)))


def new_session(key: str) -> aiohttp.ClientSession:
    """For requests to the server that has this key. No limits: the engine bounds what runs, and a request
    takes as long as it takes."""
    return aiohttp.ClientSession(
        # a connection that is kept may be closed by the server, which is idle for seconds at most, when the
        # next request is on it
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"Authorization": f"Bearer {key}"},
    )


def completion_of(request: Request, answer: dict[str, Any]) -> Completion:
    """What SGLang's answer to /generate says.

    Raises:
        EngineError: if it lacks log-probabilities or versions for a token.
    """
    tokens, meta = tuple(answer["output_ids"]), answer["meta_info"]
    logprobs = tuple(float(row[0]) for row in meta.get("output_token_logprobs") or ())
    versions = meta.get(VERSIONS) or ()
    if not len(tokens) == len(logprobs) == len(versions) or None in versions:
        raise EngineError(
            f"request {request.id}: {len(tokens)} tokens, {len(logprobs)} log-probabilities, versions {versions}"
        )
    runs = [(version, len(list(same))) for version, same in itertools.groupby(versions)]
    spans = tuple(
        zip(itertools.accumulate(count for _, count in runs), (version for version, _ in runs), strict=True)
    )
    if (
        request.sampling.temperature and request.sampling.top_k == 1
    ):  # SGLang decodes it as greedy: the one token has probability 1
        logprobs = (0.0,) * len(tokens)
    return Completion(tokens, logprobs, spans, str(meta["finish_reason"]["type"]))

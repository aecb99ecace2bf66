"""Generates deterministic tokens without a model, for dry runs.

Tokens, lengths and delays are hashes of (request id without its last part, prompt), so a group that is leased
again gets the same rollouts. Weight updates are fetched and verified as in every engine, but not used.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import xxhash

from protocol.errors import EngineError, WeightError
from protocol.messages import WeightManifest
from rollout.engines.base import Capabilities, Completion, Engine, EngineConfig, Occupancy, Request, Served
from rollout.engines.requests import check_request, read_config, spans_of
from rollout.staging.in_process import InProcessStaging
from rollout.staging.placement import ExpectedTensor
from rollout.staging.staging import Staging

VOCAB_SIZE = 64
"""Vocabulary size if the model directory has no config.json."""


class AnyStaging(Staging):
    """Staging that accepts every model: it expects exactly the tensors in the manifest."""

    def check(self, manifest: WeightManifest) -> None:
        self._sources = {e.name: ExpectedTensor(e.dtype, e.shape, ()) for e in manifest.tensors}
        super().check(manifest)


class ScriptedEngine(Engine):
    """Engine without a model.

    Log-probabilities are those of a uniform distribution. Completions end before `max_tokens` only if the
    request has stop tokens.
    """

    def __init__(self, config: EngineConfig, model_dir: Path, incarnation: str) -> None:
        self._config = config
        self._model_dir = model_dir
        self._name = incarnation
        self.capabilities = Capabilities()
        self._vocab = VOCAB_SIZE
        self._served = Served()
        self._staging = InProcessStaging(AnyStaging({}), config.stage_timeout_s)
        self._changed = asyncio.Condition()
        self._paused = False
        self._slots = config.max_running
        self._running: dict[str, bool] = {}
        """Request id -> False if it was aborted."""
        self._closed = False

    @property
    def served(self) -> Served:
        return self._served

    async def start(self) -> None:
        if (self._model_dir / "config.json").exists():
            self._vocab = int(read_config(self._model_dir).get("vocab_size", VOCAB_SIZE))

    async def generate(self, request: Request) -> Completion:
        await self.check()
        check_request(
            request, vocab_size=self._vocab, max_model_len=self._config.max_model_len, running=self._running
        )
        script, reason = self._script(request)
        delay_s = self._delay_s(request)
        versions: list[int] = []
        self._running[request.id] = True
        try:
            if await self._wait_until(request.id, lambda: self._slots > 0):
                self._slots -= 1
                try:
                    while len(versions) < len(script) and await self._wait_for_token(request.id, delay_s):
                        versions.append(self._served.version)
                finally:
                    await self._notify(slots=1)
        finally:
            del self._running[request.id]
        await self.check()
        done = len(versions)
        logprob = -math.log(self._vocab)
        return Completion(
            tuple(script[:done]),
            (logprob,) * done,
            spans_of(versions),
            reason if done == len(script) else "abort",
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._running:
                self._running[request_id] = False
        await self._notify()

    async def pause(self) -> None:
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        await self._notify()

    async def stage(self, manifest: WeightManifest) -> None:
        await self.check()
        await self._staging.stage(manifest)

    async def commit(self, manifest: WeightManifest) -> float:
        await self.check()
        start = time.perf_counter()
        self._served = self._staging.staging.take(manifest)
        return (time.perf_counter() - start) * 1e3

    async def adopt(self, epoch: str, version: int) -> None:
        if self._served.version < 0:
            raise WeightError(f"{self._name} serves no version yet that could be renamed")
        self._served = Served(epoch, version, self._served.digest)

    async def live_digest(self) -> int:
        """Return the digest of the last committed version."""
        return self._served.digest

    async def occupancy(self) -> Occupancy:
        await self.check()
        return Occupancy(running=self._config.max_running - self._slots)

    async def check(self) -> None:
        if self._closed:
            raise EngineError(f"engine {self._name} is closed")

    async def close(self) -> None:
        self._closed = True
        self._paused = False
        await self.abort(list(self._running))
        self._staging.staging.close()

    async def _wait_for_token(self, request_id: str, delay_s: float) -> bool:
        """Wait for the duration of one token; return False if the request was aborted."""
        if delay_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._wait_until(request_id, lambda: False)
        else:
            await asyncio.sleep(0)
        return await self._wait_until(request_id, lambda: not self._paused)

    async def _wait_until(self, request_id: str, ready: Callable[[], bool]) -> bool:
        """Wait until `ready()` or the request is aborted; return False if it was aborted."""
        if self._running[request_id] and not ready():
            async with self._changed:
                await self._changed.wait_for(lambda: ready() or not self._running[request_id])
        return self._running[request_id]

    async def _notify(self, slots: int = 0) -> None:
        self._slots += slots
        async with self._changed:
            self._changed.notify_all()

    def _script(self, request: Request) -> tuple[list[int], str]:
        """Return tokens and finish reason of a request that is not aborted."""
        sampling = request.sampling
        numbers = _numbers(_stem(request.id), request.prompt)
        stop = sampling.stop_token_ids
        free = [t for t in range(self._vocab) if t not in stop]
        length = 1 + next(numbers) % sampling.max_tokens if stop else sampling.max_tokens
        ends = bool(stop) and (length < sampling.max_tokens or next(numbers) % 2 == 0)
        tokens = [free[next(numbers) % len(free)] for _ in range(length)]
        if ends:
            tokens[-1] = stop[next(numbers) % len(stop)]
        return tokens, "stop" if ends else "length"

    def _delay_s(self, request: Request) -> float:
        stem = _stem(request.id)
        group = stem.rpartition("/")[0] or stem
        share = _hash(f"straggler 0 {group}") / 2**64
        return self._config.seconds_per_token * (
            self._config.straggler_factor if share < self._config.straggler_share else 1.0
        )


def _stem(request_id: str) -> str:
    return request_id.rpartition("/")[0] or request_id


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


def _numbers(stem: str, prompt: Sequence[int]) -> Iterator[int]:
    base = f"0 {stem} {','.join(map(str, prompt))}"
    i = 0
    while True:
        yield _hash(f"{base} {i}")
        i += 1

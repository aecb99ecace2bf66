"""Bench with one started engine under test, two models, versions of their weights, and faulty versions."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import PreTrainedModel

from protocol.device.shared_tensors import SharedTensors
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.buckets import manifest_digest
from rollout.engines.base import Completion, Engine, EngineConfig, KvPolicy, Request, Sampling
from rollout.engines.contract.models import (
    follows,
    switched_logits,
    tiny_model,
    weights,
    write_shared,
    write_shm,
)
from rollout.engines.registry import make_engine
from rollout.engines.sampling import sampled_distribution

PROMPTS = ((5, 17, 200, 33, 9, 411), (7, 17, 200, 33), (8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10))
LONG = 1900
"""Token limit that no engine reaches during a test; `MAX_MODEL_LEN` leaves room for it."""
MAX_MODEL_LEN = 2048
PILOT = 16
TURNS = 50
"""Number of engine calls between two steps."""


@dataclass
class Bench:
    """One started engine, and two models whose weights it can serve."""

    engine: Any
    kv: KvPolicy
    models: Mapping[str, PreTrainedModel]
    directory: Path
    published: Mapping[str, Mapping[str, torch.Tensor]]
    """Model -> tensors that make the engine serve it: the model's tensors, or those of an adapter."""
    margin: float = 0.0
    """Tolerated distance of a greedy token's logit from the largest; above 0 for half-precision engines."""
    computes: bool = True
    """False: the engine has no model, so its tokens are meaningless."""
    shares: bool = False
    """True: the transport is `shared`."""
    layers: bool = False
    """True: `layers` staging from files is the only way to transfer versions."""
    caches: bool = False
    """True: the engine has a prefix cache."""
    min_accepted: float | None = None
    """Lower bound of the fraction of accepted drafts; None: the engine does not draft."""
    last: int = -1
    """Latest published version."""
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    """Masters of the latest version, if versions are shared."""
    rooms: list[SharedTensors] = field(default_factory=list)
    """Memory of the masters, closed at the end."""
    pilots: int = 1
    """Number of consecutive pilots after which earlier requests certainly run; over HTTP, a pilot may
    overtake them."""

    def follows(
        self,
        rows: Sequence[tuple[int, str]],
        prompt: Sequence[int],
        tokens: Sequence[int],
        *,
        recompute: bool,
    ) -> bool:
        """Return whether tokens are greedy for rows (end, model name). True if the engine has no model."""
        models = [(end, self.models[name]) for end, name in rows]
        return not self.computes or follows(models, prompt, tokens, recompute=recompute, margin=self.margin)

    def assert_logprobs(self, sampling: Sampling, found: Sequence[float], expected: Sequence[float]) -> None:
        """Assert that log-probabilities match values computed on CPU in another order of operations.

        Expected values are -inf for tokens that cannot be sampled, and NaN where this depends on rounding.
        """
        bound = 1e-3 if torch.cuda.is_available() else 1e-4
        pairs = torch.tensor([found, expected])
        if self.margin:  # tokens that tie with the last token kept by top-k or top-p are kept, too
            bound = 2 * self.margin + (
                math.log1p(2 / sampling.top_k) if sampling.top_k else 0.05 if sampling.top_p < 1 else 0.0
            )
            pairs = pairs[:, ~pairs[1].isnan()]
            assert pairs.shape[1] > 0.2 * len(found)
        torch.testing.assert_close(pairs[0], pairs[1], atol=bound, rtol=0)

    def expected_logprob(self, logits: torch.Tensor, sampling: Sampling, token: int) -> float:
        """Return a token's log-probability for logits [V]; NaN as in `assert_logprobs`."""
        distribution = sampled_distribution(logits, sampling)
        if distribution[token].isfinite():
            return float(distribution[token])
        below = logits[distribution.isfinite()].min() - logits[token]
        return math.nan if below <= 2 * self.margin else -math.inf

    def assert_switched_logprobs(
        self, rows: Sequence[tuple[int, str]], prompt: Sequence[int], completion: Completion
    ) -> None:
        """Assert that the log-probabilities of a completion at temperature 0 or 1 match the models.

        Args:
            rows: (end, model name).
            prompt: token ids.
        """
        assert len(completion.logprobs) == len(completion.tokens)
        if not self.computes:
            return
        models = [(end, self.models[name]) for end, name in rows]
        recompute = self.kv is KvPolicy.RECOMPUTE
        logits = switched_logits(models, prompt, completion.tokens, recompute=recompute)
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
        self.assert_logprobs(Sampling(max_tokens=1), completion.logprobs, expected.tolist())

    def publish(self, name: str, epoch: str = "e1") -> WeightManifest:
        """Write the next version with the weights of a model."""
        return self.publish_tensors(self.published[name], epoch)

    def publish_tensors(self, tensors: Mapping[str, torch.Tensor], epoch: str = "e1") -> WeightManifest:
        self.last += 1
        if self.shares:
            manifest, self.masters, room = write_shared(
                self.directory / f"v{self.last}.msgpack", tensors, self.last, epoch=epoch
            )
            self.rooms.append(room)
            return manifest
        bucket_bytes = (
            sum(tensor.nbytes for tensor in tensors.values()) // 6
        )  # several buckets, several tensors in one
        return write_shm(
            self.directory / f"v{self.last}", tensors, self.last, epoch=epoch, bucket_bytes=bucket_bytes
        )

    async def serve(self, name: str) -> WeightManifest:
        """Publish, stage and commit a model's weights."""
        manifest = self.publish(name)
        await self.engine.stage(manifest)
        await self.engine.commit(manifest)
        return manifest

    async def pilot(self, name: str) -> None:
        """Wait until the engine has generated some more tokens for every running request."""
        await self.engine.generate(Request(f"{name}/0", (3, 4), Sampling(max_tokens=PILOT, temperature=0)))

    async def turns(self) -> None:
        """Wait for more steps than a short request takes, unless the engine is paused."""
        for _ in range(TURNS):
            await self.engine.live_digest()
            await asyncio.sleep(0)

    @asynccontextmanager
    async def long(self, *prompts: Sequence[int]) -> AsyncIterator[list["asyncio.Task[Completion]"]]:
        """Run greedy requests for the duration of the body; abort them at its end."""
        ids = [f"long{i}/0" for i in range(len(prompts))]
        async with asyncio.TaskGroup() as group:
            requests = [
                Request(i, tuple(p), Sampling(max_tokens=LONG, temperature=0))
                for i, p in zip(ids, prompts, strict=True)
            ]
            tasks = [
                group.create_task(self.engine.generate(request), name=request.id) for request in requests
            ]
            for _ in range(self.pilots):
                await self.pilot("before")
            yield tasks
            await self.engine.abort(ids)


@asynccontextmanager
async def open_bench(
    config: EngineConfig,
    directory: Path,
    *,
    computes: bool = True,
    caches: bool = False,
    margin: float = 0.0,
) -> AsyncIterator[Bench]:
    """Start an engine on a tiny model, and close it at the end.

    Args:
        config: engine settings; `max_model_len` must be `MAX_MODEL_LEN`.
        directory: empty directory for model and versions.
        computes, caches, margin: fields of `Bench`.
    """
    dtype: torch.dtype = getattr(torch, config.dtype)
    models = {name: tiny_model(seed, dtype=dtype) for seed, name in enumerate("AB", 1)}
    models["A"].save_pretrained(directory / "model")
    engine = make_engine(config, directory / "model", "engine.test")
    try:
        await engine.start()
        yield Bench(
            engine,
            config.kv,
            models,
            directory,
            {name: weights(model, dtype) for name, model in models.items()},
            margin=margin,
            computes=computes,
            caches=caches,
        )
    finally:
        await engine.close()


async def together(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Return the completions of concurrent requests."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(request), name=request.id) for request in requests]
    return [task.result() for task in tasks]


def ask(name: str, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> Request:
    """Return a request for one completion; greedy unless `sampling` sets a temperature."""
    return Request(
        f"{name}/0", tuple(prompt), Sampling(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})
    )


def _resealed(manifest: WeightManifest, entries: Sequence[TensorEntry]) -> WeightManifest:
    return msgspec.structs.replace(manifest, tensors=tuple(entries), digest=manifest_digest(entries))


def _corrupted(bench: Bench) -> WeightManifest:
    manifest = bench.publish("B")
    entry = manifest.tensors[-2]
    if bench.shares:
        bench.masters[entry.name].view(torch.int32).bitwise_xor_(1)
        return manifest
    path = Path(manifest.location) / f"bucket_{entry.bucket:05d}.bin"
    data = bytearray(path.read_bytes())
    data[entry.offset + entry.nbytes // 2] ^= 1
    path.write_bytes(data)
    return manifest


def _truncated(bench: Bench) -> WeightManifest:
    manifest = bench.publish("B")
    path = Path(manifest.location) if bench.shares else Path(manifest.location) / "bucket_00001.bin"
    path.write_bytes(path.read_bytes()[:-1])
    return manifest


def _file_missing(bench: Bench) -> WeightManifest:
    manifest = bench.publish("B")
    (Path(manifest.location) if bench.shares else Path(manifest.location) / "bucket_00001.bin").unlink()
    return manifest


def _twice(bench: Bench) -> WeightManifest:
    manifest = bench.publish("B")
    return _resealed(manifest, [*manifest.tensors, manifest.tensors[0]])


def _overlap(bench: Bench) -> WeightManifest:
    manifest = bench.publish("B")
    first, second = [e for e in manifest.tensors if e.bucket == manifest.tensors[3].bucket][:2]
    moved = msgspec.structs.replace(second, offset=first.offset)
    return _resealed(manifest, [moved if e is second else e for e in manifest.tensors])


def _without_one(bench: Bench) -> WeightManifest:
    tensors = dict(bench.published["B"])
    tensors.popitem()
    return bench.publish_tensors(tensors)


def _changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Bench], WeightManifest]:
    def make(bench: Bench) -> WeightManifest:
        tensors = bench.published["B"]
        name = next(name for name in tensors if "layers.1.mlp." in name and "down_proj" in name)
        return bench.publish_tensors({**tensors, name: change(tensors[name])})

    return make


OTHER_DTYPES = {
    torch.float32: torch.float64,
    torch.float16: torch.bfloat16,
    torch.bfloat16: torch.float16,
}
"""dtype of a version -> dtype that cannot be converted to it without rounding."""
FAULTS: dict[str, Callable[[Bench], WeightManifest]] = {
    "corrupted": _corrupted,
    "truncated": _truncated,
    "file missing": _file_missing,
    "twice": _twice,
    "overlap": _overlap,
    "digest": lambda bench: msgspec.structs.replace(bench.publish("B"), digest=1),
    "tensor missing": _without_one,
    "shape": _changed(lambda t: t.mT.contiguous()),
    "dtype": _changed(lambda tensor: tensor.to(OTHER_DTYPES[tensor.dtype])),
    "unknown": lambda bench: bench.publish_tensors(
        {**bench.published["B"], "model.extra.weight": torch.zeros(3)}
    ),
    "architecture": lambda bench: msgspec.structs.replace(bench.publish("B"), base_model="Qwen3ForCausalLM"),
}

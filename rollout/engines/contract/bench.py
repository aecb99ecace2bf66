"""Holds one started engine under test, with two models, versions of their weights, and faulty versions."""

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
"""Tokens: more than any engine here makes during a test; `MAX_MODEL_LEN` leaves room for them."""
MAX_MODEL_LEN = 2048
PILOT = 16
TURNS = 50
"""Calls between two steps."""


@dataclass
class Bench:
    """One started engine, and two models whose weights it can serve."""

    engine: Any
    kv: KvPolicy
    models: Mapping[str, PreTrainedModel]
    directory: Path
    published: Mapping[str, Mapping[str, torch.Tensor]]
    """Model -> the tensors that make the engine serve it: all of the model's, or those of an adapter."""
    margin: float = 0.0
    """By how much the logit of a greedy token may lie below the largest: more than 0 where the engine
    computes in half precision."""
    computes: bool = True
    """False: the engine has no model, so its tokens have no meaning."""
    shares: bool = False
    """True: versions come by the transport `shared`."""
    layers: bool = False
    """True: versions are staged where their files have them, and come by no other transport."""
    caches: bool = False
    """True: the engine has a prefix cache."""
    least_accepted: float | None = None
    """More than this share of its drafts is accepted; None: it drafts nothing."""
    last: int = -1
    """Newest version that was published."""
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    """Masters of that version, where versions are shared."""
    rooms: list[SharedTensors] = field(default_factory=list)
    """In which masters are, to be closed at the end."""
    pilots: int = 1
    """After how many pilots in a row earlier requests certainly run: over HTTP one may overtake them."""

    def follows(
        self,
        rows: Sequence[tuple[int, str]],
        prompt: Sequence[int],
        tokens: Sequence[int],
        *,
        recompute: bool,
    ) -> bool:
        """Return whether tokens are greedy; rows (end, name of the model). True if the engine has none."""
        models = [(end, self.models[name]) for end, name in rows]
        return not self.computes or follows(models, prompt, tokens, recompute=recompute, margin=self.margin)

    def assert_logprobs(self, sampling: Sampling, found: Sequence[float], expected: Sequence[float]) -> None:
        """Whether an engine's log-probabilities are those that were computed on the CPU, in another order.

        Expected ones are -inf for tokens that cannot be sampled, and NaN where rounding decides that.
        """
        bound = 1e-3 if torch.cuda.is_available() else 1e-4
        pairs = torch.tensor([found, expected])
        if self.margin:  # tokens that tie with the last that top-k or top-p keeps are kept, too
            bound = 2 * self.margin + (
                math.log1p(2 / sampling.top_k) if sampling.top_k else 0.05 if sampling.top_p < 1 else 0.0
            )
            pairs = pairs[:, ~pairs[1].isnan()]
            assert pairs.shape[1] > 0.2 * len(found)
        torch.testing.assert_close(pairs[0], pairs[1], atol=bound, rtol=0)

    def expected_logprob(self, logits: torch.Tensor, sampling: Sampling, token: int) -> float:
        """Return a sampled token's log-probability, given logits [V]; NaN as in `assert_logprobs`."""
        distribution = sampled_distribution(logits, sampling)
        if distribution[token].isfinite():
            return float(distribution[token])
        below = logits[distribution.isfinite()].min() - logits[token]
        return math.nan if below <= 2 * self.margin else -math.inf

    def assert_switched_logprobs(
        self, rows: Sequence[tuple[int, str]], prompt: Sequence[int], completion: Completion
    ) -> None:
        """Whether the log-probabilities of a completion at temperature 0 or 1 are those of the models.

        Args:
            rows: (end, name of the model).
            prompt: token ids.
            completion: of the prompt.
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
        """Write the next version, with the weights of a model."""
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
        """Publish, stage and commit."""
        manifest = self.publish(name)
        await self.engine.stage(manifest)
        await self.engine.commit(manifest)
        return manifest

    async def pilot(self, name: str) -> None:
        """Wait until the engine has made some more tokens for every running request."""
        await self.engine.generate(Request(f"{name}/0", (3, 4), Sampling(max_tokens=PILOT, temperature=0)))

    async def turns(self) -> None:
        """Wait until the engine has made more steps than a short request takes, unless it is paused."""
        for _ in range(TURNS):
            await self.engine.live_digest()
            await asyncio.sleep(0)

    @asynccontextmanager
    async def long(self, *prompts: Sequence[int]) -> AsyncIterator[list["asyncio.Task[Completion]"]]:
        """Greedy requests that run while the body does, and are aborted at its end."""
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
        config: its settings; `max_model_len` has to be `MAX_MODEL_LEN`.
        directory: an empty one, for model and versions.
        computes, caches, margin: fields of the bench.
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
    """Completions of requests that run at once."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(engine.generate(request), name=request.id) for request in requests]
    return [task.result() for task in tasks]


def ask(name: str, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> Request:
    """Return a request of one completion, greedy unless `sampling` says otherwise."""
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
"""Type of a version -> one that it cannot be converted from without rounding."""
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

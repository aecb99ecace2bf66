"""The ways of bringing a new version to the engine that are compared: each takes one version, and says when
its phases began and ended."""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol

import msgspec

from protocol.messages import WeightManifest
from protocol.weights.provisional import provisional_manifest
from rollout.engines.multi_process.engine import MultiProcessEngine
from tests.benchmarks.gpu.engine import MeasuredEngine
from tests.benchmarks.gpu.flip import Flip
from tests.benchmarks.gpu.gaps import Phase
from tests.benchmarks.gpu.groups import HOST, free_port
from tests.benchmarks.gpu.partner import Partner


class Way(Protocol):
    """One way of updating. The time before the first phase's beginning is not the update's: the optimizer's
    step."""

    async def prepare(self) -> None:
        """What is done once."""

    async def update(self, version: int) -> tuple[list[Phase], dict[str, float]]:
        """Bring a version to the engine. Returns the phases in order, and other figures."""

    async def verify(self) -> bool:
        """Whether the live weights are those that were sent last."""


class Trainer(Protocol):
    """A trainer's process, as a way sees it."""

    async def ask(self, do: str, limit_s: float = 120.0, **order: Any) -> dict[str, Any]:
        """What it answers to an order."""


class Ours:
    """The project's own: publish, stage while decoding continues, commit between two steps.

    Where a version is received while it is published, the phase "stage" is what is left of that when it is
    published.
    """

    def __init__(
        self, engine: MultiProcessEngine, partner: Trainer, transport: str, bucket_mb: int = 0
    ) -> None:
        self._engine = engine
        self._partner = partner
        self._transport = transport
        self._bucket_mb = bucket_mb
        self._manifest: WeightManifest | None = None

    async def prepare(self) -> None:
        await self._partner.ask("open", transport=self._transport, bucket_mb=self._bucket_mb)

    async def update(self, version: int) -> tuple[list[Phase], dict[str, float]]:
        await self._partner.ask("step")
        drafted = (await self._partner.ask("draft", version=version))["drafted"]
        async with asyncio.TaskGroup() as group:
            if drafted and self._manifest is not None:
                group.create_task(
                    self._engine.stage(provisional_manifest(self._manifest, version)), name="stage"
                )
            sent = await self._partner.ask("publish", version=version)
            began = monotonic()
        manifest = msgspec.msgpack.decode(bytes.fromhex(sent["manifest"]), type=WeightManifest)
        await self._engine.stage(manifest)
        staged = monotonic()
        pause_ms = await self._engine.commit(manifest)
        ended = monotonic()
        self._manifest = manifest
        await self._partner.ask("retire", version=version)
        phases = [
            Phase("publish", sent["began"], sent["ended"]),
            Phase("handover", sent["ended"], began),
            Phase("stage", began, staged),
            Phase("commit", staged, ended),
        ]
        return phases, {"pause_ms": pause_ms}

    async def verify(self) -> bool:
        return self._manifest is not None and await self._engine.live_digest() == self._manifest.digest


class Paused:
    """What the other ways share: generation stands still from before the first byte until after the last."""

    def __init__(self, engine: MeasuredEngine, partner: Partner) -> None:
        self._engine = engine
        self._partner = partner

    async def update(self, version: int) -> tuple[list[Phase], dict[str, float]]:
        began = (await self._partner.ask("step"))["began"]
        await self._engine.llm.pause_generation(mode="keep", clear_cache=False)
        paused = monotonic()
        moved = await self._move(paused)  # if it fails nobody resumes: half of a version may lie in the model
        await self._engine.llm.resume_generation()
        resumed = monotonic()
        phases = [Phase("pause", began, paused), *moved, Phase("resume", moved[-1].ended, resumed)]
        return phases, {"pause_ms": (resumed - began) * 1e3}

    async def verify(self) -> bool:
        return bool(await self._engine.live_digest() == (await self._partner.ask("digest"))["digest"])

    async def _move(self, began: float) -> list[Phase]:
        raise NotImplementedError


class VllmNccl(Paused):
    """vLLM's own weight transfer over NCCL, packed, as its documentation says: pause, start, update, finish,
    resume."""

    async def prepare(self) -> None:
        from vllm.distributed.weight_transfer import nccl_engine
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._engine.worker("transfer", "nccl")
        port = free_port()
        info: dict[str, Any] = {
            "master_address": HOST,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 2,
        }
        packed = {"packed": True}
        at_start = (
            "packed" in nccl_engine.NCCLWeightTransferInitInfo.__dataclass_fields__
        )  # newer ones are told here
        async with asyncio.TaskGroup() as group:
            group.create_task(self._partner.ask("join_vllm", port=port), name="join-trainer")
            group.create_task(
                self._engine.llm.init_weight_transfer_engine(
                    WeightTransferInitRequest(info | (packed if at_start else {}))
                ),
                name="join-engine",
            )
        self._info = {
            "names": [name for name, _ in self._partner.shapes],
            "dtype_names": [self._engine.dtype] * len(self._partner.shapes),
            "shapes": [shape for _, shape in self._partner.shapes],
        } | ({} if at_start else packed)

    async def _move(self, began: float) -> list[Phase]:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._engine.llm
        await llm.start_weight_update()
        started = monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._partner.ask("send_vllm"), name="send")
            group.create_task(
                llm.update_weights(WeightTransferUpdateRequest(dict(self._info))), name="receive"
            )
        received = monotonic()
        await llm.finish_weight_update()
        return [
            Phase("start", began, started),
            Phase("transfer", started, received),
            Phase("finish", received, monotonic()),
        ]


class VllmIpc(Paused):
    """vLLM's own weight transfer by CUDA IPC, all tensors in one call as it does by default. Trainer and
    engine share a GPU."""

    async def prepare(self) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._engine.worker("transfer", "ipc")
        await self._engine.llm.init_weight_transfer_engine(WeightTransferInitRequest({}))

    async def _move(self, began: float) -> list[Phase]:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._engine.llm
        await llm.start_weight_update()
        started = monotonic()
        info = (await self._partner.ask("export_vllm"))["info"]
        await llm.update_weights(WeightTransferUpdateRequest(info))
        received = monotonic()
        await llm.finish_weight_update()
        return [
            Phase("start", began, started),
            Phase("transfer", started, received),
            Phase("finish", received, monotonic()),
        ]


class PerTensor(Paused):
    """The usual way: a broadcast for each tensor, each loaded by the model's own loader."""

    async def prepare(self) -> None:
        port = free_port()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._partner.ask("join", port=port), name="join-trainer")
            group.create_task(self._engine.worker("join", port), name="join-engine")

    async def _move(self, began: float) -> list[Phase]:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._partner.ask("send"), name="send")
            group.create_task(
                self._engine.worker("receive", self._partner.shapes, self._engine.dtype), name="receive"
            )
        return [Phase("transfer", began, monotonic())]


PAUSED: dict[str, Callable[[MeasuredEngine, Partner], Way]] = {
    "vllm-nccl": VllmNccl,
    "vllm-ipc": VllmIpc,
    "per-tensor": PerTensor,
}
"""Ways that are not the project's."""


def make_way(name: str, engine: MeasuredEngine, partner: Partner, bucket_mb: int) -> Way:
    """The way of that name; a name that is none of the others is a transport of the project's."""
    if name == "flip":
        return Flip(engine)
    if name in PAUSED:
        return PAUSED[name](engine, partner)
    return Ours(engine, partner, name, bucket_mb)

"""Runs one tensor-parallel rank of the engine `megatron`, and answers the engine's calls.

The engine sends every call to every rank in the same order, so the ranks' collectives match. Staging calls
run at any time, concurrently with steps; all other calls run between two steps. All ranks compute the same
logits; rank 0 writes them to memory shared with the engine.
"""

import mmap
import os
import queue
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from protocol.device.shared_layout import rank_file
from protocol.messages import WeightManifest
from protocol.weights.lora import LoraConfig
from rollout.engines.multi_process.parent_watch import exit_with_parent
from rollout.engines.multi_process.rank_rpc import RankCall, RankRpcServer, socket_path
from rollout.engines.multi_process.shared_rank import LiveSlice, SharedRankPlan
from rollout.engines.named_adapters import named_tensors
from rollout.staging.places import StagingRoom
from rollout.staging.rank import RankPlan, RankStaging
from rollout.staging.rank_status import RankCommit
from rollout.staging.releasable_memory import ReleasableMemory
from rollout.staging.shared_weights import describe, share_parameters
from rollout.staging.staging_plan import trace
from trainer.megatron.inference.model import CachedModel
from trainer.ranks.process_group import join_ranks

EXPERTS = np.uint16
"""dtype of expert indices in an answer."""


class TensorRankSettings(msgspec.Struct, frozen=True):
    """Engine settings for each rank."""

    model_dir: str
    dtype: str
    running: int
    """Maximum sequences of a pass."""
    length: int
    """Maximum length of a sequence, tokens."""
    buffer_bytes: int
    records_experts: bool
    adapters: LoraConfig
    named: dict[str, str]
    """Name -> PEFT directory of adapters that requests may name."""
    staging: StagingRoom
    shared: str
    """File that describes rank 0's live weights to a trainer that computes with them; empty: none."""
    threads: int
    start_timeout_s: float


class RankLoaded(msgspec.Struct, frozen=True):
    """Answer to `load`."""

    pages: int
    """Number of KV cache pages."""
    unplaced: list[str]
    """Tensors of a version without a shard on this rank."""


class TensorRank:
    """Model shard of one rank, with its staging copy."""

    def __init__(self, directory: Path, file: int, rank: int, ranks: int) -> None:
        """Store the arguments (see `main`); `load` loads the model."""
        self._directory, self._file, self._rank, self._ranks = directory, file, rank, ranks

    def load(self, given: dict[str, Any]) -> RankLoaded:
        """Join the other ranks and load this rank's shard. A collective.

        Raises:
            SettingsError: the model is not supported, or cannot be sharded.
            EngineError: its weights cannot be staged.
            RuntimeError: out of memory.
        """
        settings = msgspec.convert(given, TensorRankSettings)
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", self._rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(settings.threads)
        store = dist.FileStore(str(self._directory / "ranks"), self._ranks)  # type: ignore[attr-defined]
        join_ranks(device, self._ranks, settings.start_timeout_s, rank=self._rank, store=store)
        model = self._model = CachedModel(
            Path(settings.model_dir),
            dtype=settings.dtype,
            running=settings.running,
            length=settings.length,
            buffer_bytes=settings.buffer_bytes,
            records_experts=settings.records_experts,
            adapters=settings.adapters,
            named=named_tensors(settings.named, Path(settings.model_dir)),
            ranks=self._ranks,
        )
        architecture = model.architecture
        self.staging = RankStaging(
            self._plan(settings), architecture=architecture.name, tied=architecture.tied
        )
        if self._rank == 0:
            count = settings.running * architecture.vocabulary
            memory = mmap.mmap(self._file, 4 * count)
            self._logits = torch.frombuffer(memory, dtype=torch.float32, count=count)
        return RankLoaded(model.pages, self.staging.unplaced)

    def _plan(self, settings: TensorRankSettings) -> RankPlan:
        """Return the staging plan; if the trainer computes with the live weights, share them."""
        model = self._model
        if settings.shared:
            self._shared, buffers = share_parameters(model.module, model.buffers())
            describe(self._shared, rank_file(Path(settings.shared), self._rank), model.base, buffers)
            if not settings.adapters.rank:
                slices = {
                    name: LiveSlice(model.shapes[name], box, part)
                    for name, (box, part) in model.slices().items()
                }
                return SharedRankPlan(slices, self._rank)
        dtype = getattr(torch, settings.dtype)
        plan = trace(model.load, model.parameters.items(), model.shapes, dtype, settings.staging)
        lost = [*plan.live.values(), *plan.releasable, *model.cache.tensors]
        self._memory = ReleasableMemory(lost, kept=model.base.values())
        return plan

    def prefill(
        self,
        clear: Sequence[int],
        sequences: Sequence[Sequence[int]],
        tables: Sequence[Sequence[int]],
        adapters: Sequence[str],
    ) -> bytes:
        """Clear pages, run `CachedModel.prefill`, and publish its logits and experts with `_show`."""
        self._clear(clear)
        return self._show(self._model.prefill(sequences, tables, adapters))

    def decode(
        self,
        clear: Sequence[int],
        tokens: Sequence[int],
        lengths: Sequence[int],
        tables: Sequence[Sequence[int]],
        adapters: Sequence[str],
    ) -> bytes:
        """Clear pages, run `CachedModel.decode`, and publish its logits and experts with `_show`."""
        self._clear(clear)
        return self._show(self._model.decode(tokens, lengths, tables, adapters))

    def stage(self, manifest: bytes, deadline_s: float) -> str:
        """Start staging a version on this rank; return the reason of a refusal, or ""."""
        return self.staging.stage(msgspec.msgpack.decode(manifest, type=WeightManifest), deadline_s)

    def commit(self, manifest: bytes) -> RankCommit:
        """Commit the staged version on this rank."""
        return self.staging.commit(msgspec.msgpack.decode(manifest, type=WeightManifest))

    def sleep(self) -> str:
        """Release the memory of weights, cache and staging copy; return the reason of a refusal, or ""."""
        refusal = self.staging.sleep()
        if not refusal:
            self._memory.release()
        return refusal

    def wake(self) -> str:
        """Reallocate the memory; return the reason of a refusal, or ""."""
        self._memory.restore()
        return self.staging.wake()

    def _clear(self, pages: Sequence[int]) -> None:
        if pages:
            self._model.clear(pages)

    def _show(self, logits: torch.Tensor) -> bytes:
        """On rank 0, write logits [N, V] to the shared memory, and return the experts of the pass.

        All ranks choose the same experts. Format: `EXPERTS` [S, N, L, K]; empty if not recorded.
        """
        experts = self._model.experts_of_pass(len(logits))
        if self._rank:
            return b""
        self._logits[: logits.numel()].copy_(logits.flatten())
        return b"" if experts is None else experts.numpy().astype(EXPERTS).tobytes()


METHODS: dict[str, Callable[..., Any]] = {
    "load": TensorRank.load,
    "divide": lambda rank, unowned: rank.staging.divide(unowned),
    "prefill": TensorRank.prefill,
    "decode": TensorRank.decode,
    "stage": TensorRank.stage,
    "status": lambda rank: rank.staging.status(),
    "cancel": lambda rank: rank.staging.cancel(),
    "commit": TensorRank.commit,
    "sleep": TensorRank.sleep,
    "wake": TensorRank.wake,
    "live_digest": lambda rank: rank.staging.live_digest(),
}
"""Methods that the engine's process may call."""
ANYTIME = ("stage", "status", "cancel")
"""Methods that only affect the staging copy, and do not wait for a step."""


def main(directory: Path, file: int, rank: int, ranks: int) -> None:
    """Serve until the engine's process ends.

    Args:
        directory: directory of the ranks' sockets and rendezvous file.
        file: descriptor of the file that rank 0 shares with the engine.
        rank: index of this rank.
    """
    exit_with_parent(lambda _: os._exit(1))
    part = TensorRank(directory, file, rank, ranks)
    calls: queue.SimpleQueue[RankCall] = queue.SimpleQueue()

    def run(call: RankCall) -> None:
        server.carry_out(call, lambda *arguments: METHODS[call.method](part, *arguments))

    server = RankRpcServer(
        socket_path(directory, rank), lambda call: run(call) if call.method in ANYTIME else calls.put(call)
    )
    while True:
        run(calls.get())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))

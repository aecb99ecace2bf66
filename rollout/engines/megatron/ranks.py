"""Generates and stages on several tensor-parallel ranks, each in its own process (`rank.py`).

This process schedules and samples as with one rank; every forward pass is one call to all ranks.
"""

import asyncio
import os
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import msgspec
import numpy as np
import torch

from protocol.device.shared_tensors import reserved
from protocol.errors import EngineError, WeightError
from protocol.messages import WeightManifest
from rollout.engines.base import EngineConfig, Served
from rollout.engines.megatron.rank import EXPERTS, RankLoaded, TensorRankSettings
from rollout.engines.multi_process.rank_processes import RankProcesses
from rollout.engines.multi_process.rank_rpc import CALL_TIMEOUT_S, start_error
from rollout.staging.ranks import AllRanksStaging
from rollout.staging.staging import Staging
from trainer.megatron.families.numbers import Architecture

MODULE = "rollout.engines.megatron.rank"


class RankedModel:
    """Model over several ranks, for a `PagedDecoder`, with commit and sleep of its weights."""

    def __init__(
        self,
        config: EngineConfig,
        settings: TensorRankSettings,
        architecture: Architecture,
        name: str,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Start the ranks and load the model.

        Args:
            loop: event loop of the engine.

        Raises:
            EngineError: a rank raised or has ended.
        """
        self._to_clear: list[int] = []
        """Pages that the next pass must clear before it uses them."""
        self._file = os.memfd_create("tether-megatron", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        memory = reserved(self._file, 4 * settings.running * architecture.vocabulary)
        self._logits = torch.frombuffer(memory, dtype=torch.float32).view(settings.running, -1)
        self._chosen = b""
        """Experts of the last pass, `EXPERTS` [S, N, *choice]; empty if not recorded."""
        experts = architecture.experts
        self._choice = experts.sparse_layers_before(architecture.layers), experts.per_token
        self._all = AllRanksStaging(
            self._call_each,
            self._call_each,
            stage_timeout_s=config.stage_timeout_s,
            call_timeout_s=CALL_TIMEOUT_S,
        )
        try:
            self.processes = RankProcesses(MODULE, config, name, loop, self._file)
        except EngineError:
            os.close(self._file)
            raise
        try:
            self.pages = self._load(settings)
        except EngineError as error:
            self.close()
            raise start_error(str(error))(str(error)) from error
        self.staging = StagedOnRanks(self._all, loop)

    def _load(self, settings: TensorRankSettings) -> int:
        """Load the model on all ranks; return the number of KV cache pages."""
        answers = self.processes.call("load", msgspec.to_builtins(settings))
        loaded = msgspec.convert(answers, list[RankLoaded])
        self.processes.run(self._all.divide([rank.unplaced for rank in loaded]))
        return min(rank.pages for rank in loaded)

    async def _call_each(self, method: str, *arguments: Any) -> list[Any]:
        return await self.processes.call_each(method, *arguments)

    def clear(self, pages: Sequence[int]) -> None:
        """Clear pages at the start of the next pass; see `CachedModel`."""
        self._to_clear += pages

    def prefill(
        self,
        sequences: Sequence[Sequence[int]],
        tables: Sequence[Sequence[int]],
        adapters: Sequence[str] = (),
    ) -> torch.Tensor:
        """Prefill sequences on all ranks; return logits [N, V], which the next pass overwrites."""
        return self._pass(len(sequences), "prefill", sequences, tables, adapters)

    def decode(
        self,
        tokens: Sequence[int],
        lengths: Sequence[int],
        tables: Sequence[Sequence[int]],
        adapters: Sequence[str] = (),
    ) -> torch.Tensor:
        """See `CachedModel`; the next pass overwrites the logits."""
        return self._pass(len(tokens), "decode", tokens, lengths, tables, adapters)

    def experts_of_pass(self, sequences: int) -> torch.Tensor | None:
        """Return the experts of the last pass; None if not recorded."""
        if not self._chosen:
            return None
        chosen = np.frombuffer(self._chosen, EXPERTS).astype(np.int64)
        return torch.from_numpy(chosen).view(-1, sequences, *self._choice)

    def apply(self) -> None:
        """Commit the taken version on all ranks; see `Committable`."""
        self.processes.run(self._all.commit(self.staging.taken))

    def digest(self) -> int:
        """Return the digest of the live weights over all ranks."""
        return self.processes.run(self._all.live_digest())

    def release(self) -> None:
        """Release the memory of all ranks; see `ReleasableMemory`."""
        if not self.processes.ended:
            self.processes.run(self._all.sleep())

    def restore(self) -> None:
        """Reallocate the memory of all ranks."""
        self.processes.run(self._all.wake())

    def close(self) -> None:
        """End the ranks. Idempotent."""
        self.processes.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _pass(self, count: int, method: str, *arguments: Any) -> torch.Tensor:
        clear, self._to_clear = self._to_clear, []
        self._chosen = self.processes.call(method, clear, *arguments)[0]
        return self._logits[:count]


class StagedOnRanks(Staging):
    """Staging copies of all ranks, behind the interface of one `Staging`."""

    def __init__(self, ranks: AllRanksStaging, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__({})
        self._ranks, self._loop = ranks, loop
        self._running: Future[None] | None = None
        self._manifest: WeightManifest | None = None

    @property
    def taken(self) -> WeightManifest:
        """Version returned by the last `take`."""
        assert self._manifest is not None
        return self._manifest

    def fetch(self, manifest: WeightManifest, deadline_s: float) -> int:
        """Stage on all ranks, each with its own deadline; see `Staging`."""
        self._staged = None
        ended = threading.Event()

        async def stage() -> None:
            try:
                await self._ranks.stage(manifest)
            finally:
                ended.set()

        running = self._running = asyncio.run_coroutine_threadsafe(stage(), self._loop)
        try:
            running.result()
        except CancelledError:
            ended.wait(2 * CALL_TIMEOUT_S)  # the ranks still have to discard the version
            raise WeightError(f"staging of version {manifest.version} was cancelled") from None
        finally:
            self._running = None
        self._staged = self._ranks.staged
        return sum(entry.nbytes for entry in manifest.tensors)

    def take(self, manifest: WeightManifest) -> Served:
        taken = super().take(manifest)
        self._manifest = manifest
        return taken

    def cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()

"""Stages a version in its files, and applies it in batches of tensors through a bounded buffer.

The only extra memory is for the largest tensor. Staging checks all digests before a live byte changes. The
commit copies each tensor into the buffer, digests it again, and copies it to its destinations. Small tensors
share the buffer, because expert models have thousands of them. On GPU, the version's own pages are locked
during staging, and the GPU reads them directly. Pages that cannot be locked are copied to pinned memory by
several threads. A failure before the first copy changes no live byte; a failure in the middle of a commit
poisons the engine.
"""

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.device.page_locks import PageLocks
from protocol.device.slice_digests import Digests
from protocol.errors import EngineError, UnfitVersion, WeightError
from protocol.messages import WeightManifest
from protocol.weights.buckets import ALIGNMENT
from rollout.staging.loader_trace import LoaderTrace, Recorder
from rollout.staging.placement import ExpectedTensor, SlicePlacement
from rollout.staging.places import BUFFERS
from rollout.staging.releasable_memory import ReleasableMemory
from rollout.staging.staging import Staging
from rollout.weights.base import ReceivedSlice, WeightReceiver
from rollout.weights.registry import make_receiver

log = logging.getLogger("tether.rollout")

COPY_THREADS = 8
"""Threads that copy to pinned memory: a thread reads a few GB/s, a GPU's bus transfers 50 GB/s."""
COPY_BYTES = 8 << 20
"""Maximum bytes per copy of a thread."""
UNLOCKING_SHARE = 0.1
"""Fraction of a fetch's deadline spent waiting for the previous version to be unlocked; then no pages are
locked."""
CANCEL_S = 0.05
"""Seconds between cancellation checks during this wait."""
CLOSE_S = 20.0
"""Seconds that `close` waits for the driver to unlock pages; the unlocking thread continues afterwards."""


class PieceBuffer:
    """Buffer that moves tensors from the host to the parameters' device in batches."""

    def __init__(
        self, nbytes: int, device: torch.device, pinned: Sequence[torch.Tensor] | None = None
    ) -> None:
        """Allocate the buffer.

        Args:
            nbytes: size of the largest tensor.
            device: device of the live parameters.
            pinned: `BUFFERS` host buffers, uint8 [nbytes], for tensors that the device cannot read directly.
                None:
                pinned memory on a GPU, otherwise no buffers.
        """
        on_gpu = device.type == "cuda"
        self.locks = PageLocks(device)
        """Locked pages, which the device reads directly."""
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        """Device buffer; released while the engine sleeps."""
        if pinned is None:
            count = BUFFERS if on_gpu else 0
            pinned = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        self._pinned = pinned
        self._read = [torch.cuda.Event() for _ in pinned] if on_gpu else []
        """Event per pinned buffer, recorded after the GPU has read it."""
        self._next = 0

    def batches(self, pieces: Iterable[ReceivedSlice]) -> Iterator[list[ReceivedSlice]]:
        """Yield the pieces in batches, copied to the device; copies are valid until the next batch.

        Args:
            pieces: dense host tensors; each batch contains as many as fit.
        """
        batch, end = list[tuple[ReceivedSlice, int]](), 0
        for piece in pieces:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            if batch and start + piece.tensor.nbytes > self.memory.numel():
                yield self._through(batch, end)
                batch, start = [], 0
            batch.append((piece, start))
            end = start + piece.tensor.nbytes
        if batch:
            yield self._through(batch, end)

    def _through(self, batch: Sequence[tuple[ReceivedSlice, int]], end: int) -> list[ReceivedSlice]:
        """Return copies of pieces on the device at their offsets; `end` is the end of the last one."""
        parts = [(start, piece.tensor.reshape(-1).view(torch.uint8)) for piece, start in batch]
        if not self._pinned or all(self.locks.holds(part) for _, part in parts if part.nbytes):
            for start, part in parts:
                self.memory[start : start + part.nbytes].copy_(part, non_blocking=True)
        else:
            turn, self._next = self._next, (self._next + 1) % BUFFERS
            if self._read:
                self._read[turn].synchronize()
            copy_by_threads(self._pinned[turn], parts)
            self.memory[:end].copy_(self._pinned[turn][:end], non_blocking=True)
            if self._read:
                self._read[turn].record()
        return [
            ReceivedSlice(
                piece.entry,
                piece.box,
                self.memory[start : start + piece.tensor.nbytes]
                .view(piece.tensor.dtype)
                .view(piece.tensor.shape),
            )
            for piece, start in batch
        ]


def copy_by_threads(memory: torch.Tensor, parts: Iterable[tuple[int, torch.Tensor]]) -> None:
    """Copy parts, each (offset, host uint8 [n]), into the host buffer `memory` (uint8)."""
    target = memory.numpy()

    def copy(start: int, part: NDArray[np.uint8]) -> None:
        target[start : start + len(part)] = part  # NumPy releases the GIL

    with ThreadPoolExecutor(COPY_THREADS, "tether-copy") as pool:
        copies = [
            pool.submit(copy, start + first, part[first : first + COPY_BYTES].numpy())
            for start, part in parts
            for first in range(0, len(part), COPY_BYTES)
        ]
    for done in copies:
        done.result()


class LayeredStaging(Staging):
    """Staging without a copy: a version is staged when its files are mapped and verified.

    `apply` performs the commit's copy.
    """

    def __init__(
        self, sources: Mapping[str, ExpectedTensor], *, architecture: str = "", tied: bool = False
    ) -> None:
        """Allocate the buffer.

        Args:
            sources: checkpoint name -> expected tensor, with the parts of live parameters that it fills.
            architecture: class name of the model in transformers; empty: any.
            tied: whether input and output embeddings are tied in this engine.
        """
        super().__init__(sources, architecture=architecture, tied=tied)
        device = next((part.target.device for one in sources.values() for part in one.slices), None)
        largest = max((_nbytes(one) for one in sources.values()), default=0)
        self.buffer = PieceBuffer(largest, device or torch.device("cpu"))
        self._pieces: list[ReceivedSlice] = []
        """Whole tensors of the staged version, mapped from its files."""
        self._into = SlicePlacement({})
        """Destinations of the pieces in the live parameters."""
        self._manifest: WeightManifest | None = None

    def discard(self) -> None:
        super().discard()
        self._forget()

    def close(self) -> None:
        super().close()
        self._staged = None
        self._forget()
        self.buffer.locks.wait(CLOSE_S)

    def _forget(self) -> None:
        self._pieces, self._manifest = [], None
        self.buffer.locks.unlock()

    def apply(self) -> None:
        """Copy the taken version over the live parameters.

        Raises:
            WeightError: the bytes differ from the verified ones; live weights may be mixed.
        """
        manifest, digests = self._manifest, Digests()
        assert manifest is not None
        with torch.no_grad():
            for batch in self.buffer.batches(self._pieces):
                for piece in batch:
                    digests.add(piece.tensor)
                digests.launch()  # before the next batch overwrites this one
                if not self.buffer.memory.is_cuda:
                    _compare(manifest, batch, digests.numbers()[-len(batch) :])
                self._into.place((piece.entry.name, piece.box, piece.tensor) for piece in batch)
            self._into.finish()
        _compare(manifest, self._pieces, digests.numbers())
        self.discard()

    def _place(self, receiver: WeightReceiver, manifest: WeightManifest, deadline_s: float) -> None:
        """Verify a version in its files, and record the location of its tensors."""
        if not receiver.is_persistent:
            raise UnfitVersion(
                f"version {manifest.version}: engine.staging is 'layers', which reads a version twice, and "
                f"weights.transport {manifest.transport!r} sends it once"
            )
        end = time.monotonic() + deadline_s
        self._forget()
        into = self._placement()
        pieces: list[ReceivedSlice] = []
        for found in receiver.slices(manifest, into.wanted, deadline_s):
            self._refuse_cancelled(manifest)
            pieces += [piece for piece in found if piece.entry.name in into.wanted]
        for piece in pieces:
            into.destination(piece.entry.name, piece.box)  # cached, to save time in the commit
        self._pieces, self._into, self._manifest = pieces, into, manifest
        share = time.monotonic() + deadline_s * UNLOCKING_SHARE
        if receiver.is_lockable and self._unlocked(manifest, min(share, end)):
            self._lock(manifest, end)
        elif self.buffer.memory.is_cuda:
            log.warning("engine.staging pages_not_locked lockable=%s", receiver.is_lockable)

    def _make_receiver(self, transport: str) -> WeightReceiver:
        return make_receiver(transport, shared=self.buffer.locks.usable)

    def _unlocked(self, manifest: WeightManifest, end: float) -> bool:
        """Wait until the previous version is unlocked, at most until `end`; return whether it is."""
        while not self.buffer.locks.wait(CANCEL_S):
            self._refuse_cancelled(manifest)
            if time.monotonic() > end:
                return False
        return True

    def _lock(self, manifest: WeightManifest, end: float) -> None:
        """Lock the version's pages for the device, at most until `end`; the commit copies the others."""
        start, locks = time.monotonic(), self.buffer.locks
        for piece in self._pieces:
            self._refuse_cancelled(manifest)
            if time.monotonic() > end or not locks.lock(piece.tensor):
                break
        if locks.nbytes:
            nbytes = sum(piece.tensor.nbytes for piece in self._pieces)
            seconds = time.monotonic() - start
            log.info(
                "engine.staging locked_mib=%d of_mib=%d seconds=%.1f",
                locks.nbytes >> 20,
                nbytes >> 20,
                seconds,
            )


class LayeredPlan(LoaderTrace):
    """Loader trace without a staging buffer: a commit copies from the version's files."""

    def __init__(
        self, live: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], recorder: Recorder
    ) -> None:
        """Store the result of `record`; arguments and errors: see `LoaderTrace`."""
        super().__init__(live, shapes, recorder)
        self._staging: LayeredStaging | None = None

    @property
    def releasable(self) -> list[torch.Tensor]:
        """Device memory of the buffer after `staging`; see `StagingPlan`."""
        return [self._staging.buffer.memory] if self._staging else []

    def staging(self, *, architecture: str, tied: bool) -> LayeredStaging:
        """Create the staging that `apply` commits from."""
        self._staging = LayeredStaging(self.sources_in(self.live), architecture=architecture, tied=tied)
        self._memory = ReleasableMemory(self.releasable)
        return self._staging

    def release(self) -> None:
        """Release the buffer's device memory. Idempotent."""
        self._memory.release()

    def restore(self) -> None:
        """Reallocate the buffer. Idempotent. Raises EngineError if memory is insufficient."""
        self._memory.restore()

    def apply(self) -> None:
        """Commit the taken version. Raises WeightError, see `LayeredStaging`."""
        if self._staging is None:
            raise EngineError("a plan without staging has no version")
        self._staging.apply()


def _nbytes(source: ExpectedTensor) -> int:
    itemsize: int = getattr(torch, source.dtype).itemsize
    return math.prod(source.shape) * itemsize


def _compare(manifest: WeightManifest, pieces: Sequence[ReceivedSlice], digests: Sequence[int]) -> None:
    for piece, found in zip(pieces, digests, strict=True):
        if found != piece.entry.digest:
            raise WeightError(
                f"version {manifest.version}: tensor {piece.entry.name} was changed after it was verified"
            )

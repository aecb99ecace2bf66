"""Stages a version where its files have it, and applies it in batches of tensors through a bounded buffer.

Beside the live parameters there is memory for the largest tensor alone. Every digest is checked when the
version is staged, before a live byte changes. In the commit each tensor is copied into the buffer, digested
there once more, and copied to its places, with what fits in the buffer beside it: a model of experts has
thousands of small ones. A GPU reads the version's own pages, which are locked when it is staged; pages that
cannot be locked are copied to pinned memory by several threads. A failure in the middle of a commit poisons
the engine, as any other; until the first tensor was copied nothing has changed.
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
"""Threads that copy to pinned memory: one reads some GB/s, the bus of a GPU takes 50."""
COPY_BYTES = 8 << 20
"""Most bytes that one of them copies at a time."""
UNLOCKING_SHARE = 0.1
"""Share of a fetch's deadline that it waits until the version before is unlocked; then it locks no pages."""
CANCEL_S = 0.05
"""Interval in which it looks meanwhile whether it was cancelled."""
CLOSE_S = 20.0
"""Most seconds that `close` waits for the driver to unlock pages; its thread continues after that."""


class PieceBuffer:
    """Memory through which tensors go from the host to the parameters' device, as many at a time as fit."""

    def __init__(
        self, nbytes: int, device: torch.device, pinned: Sequence[torch.Tensor] | None = None
    ) -> None:
        """Allocate it.

        Args:
            nbytes: of the largest tensor.
            device: of the live parameters.
            pinned: `BUFFERS` times uint8 [nbytes] of the host, through which go tensors that the device does
                not read itself. None: on a GPU pinned memory, else there is none.
        """
        on_gpu = device.type == "cuda"
        self.locks = PageLocks(device)
        """Where tensors lie that the device reads itself."""
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        """On the device; an engine that sleeps releases its storage."""
        if pinned is None:
            count = BUFFERS if on_gpu else 0
            pinned = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        self._pinned = pinned
        self._read = [torch.cuda.Event() for _ in pinned] if on_gpu else []
        """For each of them, when the GPU has read it."""
        self._next = 0

    def batches(self, pieces: Iterable[ReceivedSlice]) -> Iterator[list[ReceivedSlice]]:
        """Yield the pieces in batches, with copies on the device that are valid until the next batch.

        Args:
            pieces: dense tensors of the host; as many follow each other in a batch as fit.
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
        """Return copies of pieces on the device, each at its offset; `end` is the last one's end."""
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
    """Copy parts, each (offset, uint8 [n] of the host), into the host's `memory`, uint8 too."""
    target = memory.numpy()

    def copy(start: int, part: NDArray[np.uint8]) -> None:
        target[start : start + len(part)] = part  # numpy lets other threads run meanwhile

    with ThreadPoolExecutor(COPY_THREADS, "tether-copy") as pool:
        copies = [
            pool.submit(copy, start + first, part[first : first + COPY_BYTES].numpy())
            for start, part in parts
            for first in range(0, len(part), COPY_BYTES)
        ]
    for done in copies:
        done.result()


class LayeredStaging(Staging):
    """Staging without a copy: a version is staged once its files are mapped and verified.

    `apply` is the commit's copy.
    """

    def __init__(
        self, sources: Mapping[str, ExpectedTensor], *, architecture: str = "", tied: bool = False
    ) -> None:
        """Allocate the buffer.

        Args:
            sources: checkpoint name -> the tensor that the engine expects, and the parts of the live
                parameters that it fills.
            architecture: class of the model in transformers; empty: any.
            tied: input and output embeddings are one tensor in this engine.
        """
        super().__init__(sources, architecture=architecture, tied=tied)
        device = next((part.target.device for one in sources.values() for part in one.slices), None)
        largest = max((_nbytes(one) for one in sources.values()), default=0)
        self.buffer = PieceBuffer(largest, device or torch.device("cpu"))
        self._pieces: list[ReceivedSlice] = []
        """Whole tensors of the staged version, where its files have them."""
        self._into = SlicePlacement({})
        """Their places in the live parameters."""
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
        """Copy the version that was taken over the live parameters.

        Raises:
            WeightError: the bytes differ from those that were verified; live weights may be mixed.
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
        """Verify a version where it is, and remember where that is."""
        if not receiver.lasting:
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
            into.destination(piece.entry.name, piece.box)  # it is known then, and takes the commit no time
        self._pieces, self._into, self._manifest = pieces, into, manifest
        share = time.monotonic() + deadline_s * UNLOCKING_SHARE
        if receiver.lockable and self._unlocked(manifest, min(share, end)):
            self._lock(manifest, end)
        elif self.buffer.memory.is_cuda:
            log.warning("engine.staging pages_not_locked lockable=%s", receiver.lockable)

    def _make_receiver(self, transport: str) -> WeightReceiver:
        return make_receiver(transport, shared=self.buffer.locks.usable)

    def _unlocked(self, manifest: WeightManifest, end: float) -> bool:
        """Wait until the version before is unlocked, until `end` at most; return whether it is."""
        while not self.buffer.locks.wait(CANCEL_S):
            self._refuse_cancelled(manifest)
            if time.monotonic() > end:
                return False
        return True

    def _lock(self, manifest: WeightManifest, end: float) -> None:
        """Lock the version's pages for the device, until `end` at most; the commit copies the others."""
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
        """Take the result of `record`; arguments and errors as in `LoaderTrace`."""
        super().__init__(live, shapes, recorder)
        self._staging: LayeredStaging | None = None

    @property
    def releasable(self) -> list[torch.Tensor]:
        """See `StagingPlan`: the buffer, once there is a staging."""
        return [self._staging.buffer.memory] if self._staging else []

    def staging(self, *, architecture: str, tied: bool) -> LayeredStaging:
        """Create the staging that `apply` commits from."""
        self._staging = LayeredStaging(self.sources_in(self.live), architecture=architecture, tied=tied)
        self._memory = ReleasableMemory(self.releasable)
        return self._staging

    def release(self) -> None:
        """Release the buffer's memory on the device. Idempotent."""
        self._memory.release()

    def restore(self) -> None:
        """Take the memory again. Raises EngineError: there is no room. Idempotent."""
        self._memory.restore()

    def apply(self) -> None:
        """Commit the version that was taken from the staging. Raises WeightError, see `LayeredStaging`."""
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

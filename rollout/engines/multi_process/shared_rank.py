"""Shares one tensor-parallel rank's live weights with the trainer's same rank, which must be sharded equally.

As in `rollout/staging/shared_weights.py` there is no staging copy; a commit converts the trainer's masters
into the live weights. A rank holds only shards of most tensors. It compares their sums with the sums in the
memory of the trainer's rank 0, and all sums with the digests of the manifest.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from protocol.device.shared_layout import HELD, MASTERS, PIECES, SUMS, VERSION
from protocol.device.shared_tensors import map_tensors
from protocol.device.slice_digests import SliceSums
from protocol.errors import EngineError, UnfitVersion, WeightError
from protocol.messages import WeightManifest
from protocol.weights.boxes import Box, box_of, shape_of, size_of
from protocol.weights.piece_rows import PieceRows
from rollout.engines.base import Served
from rollout.staging.loader_trace import LoaderTrace
from rollout.staging.placement import ExpectedTensor
from rollout.staging.shared_weights import check_transport
from rollout.staging.staging import Staging, contiguous_stride, dtype_name
from rollout.weights.checked import ManifestCheck
from rollout.weights.shared import check_held
from rollout.weights.verification import Deadline, version_digest


@dataclass(frozen=True, slots=True)
class LiveSlice:
    """Shard of a tensor on one rank."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box
    live: torch.Tensor
    """View of the live weights that corresponds to the box, see `matches_layout`."""


Slices = Mapping[str, LiveSlice]
"""Checkpoint name -> shard on this rank."""


def traced_slices(trace: LoaderTrace, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LiveSlice]:
    """Return the shards that a rank's loader copied into parameters.

    Args:
        shapes: shapes of the whole tensors.

    Raises:
        EngineError: a tensor's shard is not one dense part of a parameter; the message names the tensor.
    """
    found: dict[str, LiveSlice] = {}
    for copy in trace.copies():
        shape, source, target = shapes[copy.name], copy.source, copy.target
        box = box_of(shape, source.offset, source.size, source.stride)
        if copy.name in found or box is None or target.stride != contiguous_stride(target.size):
            raise EngineError(
                f"tensor {copy.name} is not one dense part of a parameter: "
                "weights.transport 'shared' cannot serve this model"
            )
        found[copy.name] = LiveSlice(shape, box, target.on(trace.live[copy.parameter]))
    return found


class SharedRankStaging(Staging):
    """Staging without a copy for one rank's shards, see `SharedStaging`."""

    widenings = frozenset()

    def __init__(self, slices: Slices, rank: int, *, architecture: str = "", tied: bool = False) -> None:
        """Expect versions of a trainer with the same ranks.

        Args:
            slices: shards on this rank.
            rank: index of this rank.
            architecture: class name of the model in transformers; empty: any.
            tied: whether input and output embeddings are tied in this engine.
        """
        self._dtype = next(iter(slices.values())).live.dtype
        kind = dtype_name(self._dtype)
        sources = {name: ExpectedTensor(kind, part.shape, ()) for name, part in slices.items()}
        super().__init__(sources, architecture=architecture, tied=tied)
        self._slices, self._rank = slices, rank
        self._check_manifest = ManifestCheck()
        self._masters: dict[str, torch.Tensor] = {}
        self._held: torch.Tensor | None = None
        """Number of the version in the masters, in the trainer's memory."""
        self._sums = np.empty(0, np.int64)
        """Sums of all pieces, as published by the trainer."""
        self._taken: WeightManifest | None = None

    def fetch(self, manifest: WeightManifest, deadline_s: float) -> int:
        check_transport(manifest)
        self.discard()
        self._check_manifest(manifest)
        self.check(manifest)
        try:
            self._map(manifest)
            self._verify(manifest, self._masters, Deadline(manifest, deadline_s))
        except WeightError:
            self.discard()
            raise
        finally:
            self._cancelled.clear()
        self._staged = Served(manifest.epoch, manifest.version, manifest.digest)
        return sum(entry.nbytes for entry in manifest.tensors)

    def take(self, manifest: WeightManifest) -> Served:
        served = super().take(manifest)
        check_held(self._held, manifest)
        self._taken = manifest
        return served

    def apply(self) -> None:
        """Convert the masters of the taken version into the live weights, and unmap them.

        Raises:
            WeightError: the trainer has started to write to the masters; the live weights may be mixed.
        """
        assert self._taken is not None
        with torch.no_grad():
            for name, part in self._slices.items():
                part.live.copy_(self._masters[name])
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
            # GPU memory becomes undefined when the process that owns it ends
            live = {name: part.live for name, part in self._slices.items()}
            self._verify(self._taken, live, Deadline(self._taken, float("inf")))
        check_held(self._held, self._taken)
        self.discard()

    def discard(self) -> None:
        super().discard()
        self._masters, self._held, self._sums, self._taken = {}, None, np.empty(0, np.int64), None

    def _map(self, manifest: WeightManifest) -> None:
        """Map the masters of the same rank, and version and sums of rank 0."""
        if self._rank >= len(manifest.parts):
            raise UnfitVersion(
                f"version {manifest.version} is of {len(manifest.parts)} ranks, and this is rank "
                f"{self._rank} of the engine: set [parallel] as engine.tensor_parallel_size"
            )
        where = manifest.parts[self._rank].location
        own, first = map_tensors(Path(where)), map_tensors(Path(manifest.location))
        try:
            masters, self._held, sums = own[MASTERS], first[HELD][VERSION], first[SUMS][PIECES]
            found = {name: masters[name] for name in self._slices}
        except KeyError as error:
            raise WeightError(f"{where} has no {error}: it does not describe a trainer's masters") from error
        for name, master in found.items():
            live = self._slices[name].live
            if master.shape != live.shape:
                raise UnfitVersion(
                    f"tensor {name} is {list(live.shape)} in rank {self._rank} of the engine, "
                    f"{list(master.shape)} in that of the trainer: layouts of engine and trainer differ"
                )
        self._masters, self._sums = found, sums.numpy().copy()
        check_held(self._held, manifest)

    def _verify(
        self,
        manifest: WeightManifest,
        held: Mapping[str, torch.Tensor],
        deadline: Deadline,
    ) -> None:
        """Check this rank's converted shards against the published sums, and the sums against the digests.

        Raises:
            WeightError: a tensor differs; the message names it.
        """
        rows = PieceRows(manifest)
        pieces = [piece for part in manifest.parts for piece in part.pieces]
        spans = [span for part in rows.pieces for span in part]
        starts = list(accumulate((end - first for first, end in spans), initial=0))
        numbers = {(piece.tensor, piece.box): number for number, piece in enumerate(pieces)}
        indices = {entry.name: index for index, entry in enumerate(manifest.tensors)}
        sums, own = SliceSums(starts[-1], next(iter(held.values())).device), []
        for name, part in self._slices.items():
            number = numbers.get((indices[name], part.box))
            if number is None:
                raise UnfitVersion(
                    f"tensor {name}: no rank of the trainer holds exactly {list(part.box)}, as rank "
                    f"{self._rank} of the engine: they divide the model differently"
                )
            deadline.remaining(f"reading {name}")
            self._refuse_cancelled(manifest)
            converted = held[name].to(self._dtype).reshape(shape_of(part.box)).contiguous()
            sums.add(converted, part.shape, part.box, starts[number] - spans[number][0])
            own.append((name, slice(starts[number], starts[number + 1])))
        sums.launch()
        found = sums.total.cpu().numpy()
        for name, place in own:
            if not np.array_equal(found[place], self._sums[place]):
                raise WeightError(f"tensor {name}: rank {self._rank} does not hold what was published")
        ends = accumulate(sum(end - first for first, end in part) for part in rows.pieces)
        by_rank = np.split(self._sums, list(ends)[:-1])
        version_digest(manifest, rows.digests(by_rank))


class SharedRankPlan:
    """Plan for `RankStaging` of live weights that the trainer also computes with."""

    def __init__(self, slices: Slices, rank: int) -> None:
        self._slices, self._rank = slices, rank
        self.live = {name: part.live for name, part in slices.items()}
        self.unplaced: Sequence[str] = ()
        self._staging: SharedRankStaging | None = None

    def calibrate(self) -> None:
        """Return immediately: there is no copy, and the trainer compares every bit when it attaches."""

    def staging(self, *, architecture: str, tied: bool) -> SharedRankStaging:
        """Create the staging that `apply` commits from."""
        self._staging = SharedRankStaging(self._slices, self._rank, architecture=architecture, tied=tied)
        return self._staging

    def gathered(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Yield (name, tensor, whether this rank holds the whole tensor); missing parts are zero."""
        for name, part in self._slices.items():
            tensor = torch.zeros(part.shape, dtype=part.live.dtype, device=part.live.device)
            tensor[tuple(slice(*side) for side in part.box)] = part.live.reshape(shape_of(part.box))
            yield name, tensor, size_of(part.box) == tensor.numel()

    def apply(self) -> None:
        """Commit the taken version. Raises WeightError, see `SharedRankStaging`."""
        assert self._staging is not None
        self._staging.apply()

    def release(self) -> None:
        """Raise EngineError: the trainer computes with this memory."""
        raise EngineError("the trainer computes with the live weights: their memory cannot be released")

    def restore(self) -> None:
        """Return immediately: no memory was released."""

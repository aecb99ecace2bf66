"""Shares one tensor rank's live weights with the same rank of the trainer, which lays them out alike.

As in `rollout/staging/shared_weights.py` there is no staging copy, and a commit converts the trainer's
masters into the live weights; here parameter by parameter. A rank has parts of most tensors, so it compares
these with sums that the trainer's rank 0 has in its memory, and all sums with the digests of the manifest.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import torch

from protocol.device.shared_layout import HELD, MASTERS, PIECES, SUMS, VERSION
from protocol.device.shared_tensors import map_tensors
from protocol.device.slice_digests import SliceSums
from protocol.errors import EngineError, WeightError
from protocol.messages import WeightManifest
from rollout.engines.base import Served
from rollout.staging.placement import ExpectedTensor
from rollout.staging.shared_weights import check_transport
from rollout.staging.staging import Staging, dtype_name
from rollout.weights.checked import ManifestCheck
from rollout.weights.verification import Deadline, version_digest
from trainer.megatron.inference.model import CachedModel
from trainer.weights.part_layout import PieceRows


class SharedRankStaging(Staging):
    """Staging without a copy of a rank's part of a version, see `SharedStaging`."""

    def __init__(self, model: CachedModel, rank: int, *, architecture: str = "", tied: bool = False) -> None:
        """Expect versions of a trainer of the same ranks; `rank` is this one."""
        self._dtype = next(iter(model.parameters.values())).dtype
        kind = dtype_name(self._dtype)
        sources = {name: ExpectedTensor(kind, shape, ()) for name, shape in model.shapes.items()}
        super().__init__(sources, architecture=architecture, tied=tied)
        self._model, self._rank = model, rank
        self._check_manifest = ManifestCheck()
        self._masters: dict[str, torch.Tensor] = {}
        self._held: torch.Tensor | None = None
        """The number of the version that the masters hold, in the trainer's memory."""
        self._sums = np.empty(0, np.int64)
        """Sums of all pieces, as the trainer has published them."""
        self._taken: WeightManifest | None = None

    def fetch(self, manifest: WeightManifest, deadline_s: float) -> int:
        check_transport(manifest)
        self.discard()
        self._check_manifest(manifest)
        self.check(manifest)
        pieces = [list(part.pieces) for part in manifest.parts]
        if pieces != self._model.published():
            raise WeightError(
                f"version {manifest.version} is of {len(pieces)} ranks that divide the model in another way "
                "than this engine: set [parallel] as engine.tensor_parallel_size"
            )
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
        self._check_held(manifest)
        self._taken = manifest
        return served

    def apply(self) -> None:
        """Convert the masters of the version that was taken into the live parameters, and unmap them.

        Raises:
            WeightError: the trainer has begun to write to the masters; the live weights may be mixed.
        """
        assert self._taken is not None
        with torch.no_grad():
            for name, live in self._model.parameters.items():
                live.copy_(self._masters[name])
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
            # the contents of GPU memory are undefined once the process that owned it has ended
            self._verify(self._taken, self._model.parameters, Deadline(self._taken, float("inf")))
        self._check_held(self._taken)
        self.discard()

    def discard(self) -> None:
        super().discard()
        self._masters, self._held, self._sums, self._taken = {}, None, np.empty(0, np.int64), None

    def _map(self, manifest: WeightManifest) -> None:
        """Map the masters of the same rank, and version and sums of rank 0."""
        own = map_tensors(Path(manifest.parts[self._rank].location))
        first = map_tensors(Path(manifest.location))
        try:
            masters, self._held, sums = own[MASTERS], first[HELD][VERSION], first[SUMS][PIECES]
        except KeyError as error:
            where = manifest.parts[self._rank].location
            raise WeightError(f"{where} has no {error}: it does not describe a trainer's masters") from error
        for name, live in self._model.parameters.items():
            if name not in masters or masters[name].shape != live.shape:
                found = f"{list(masters[name].shape)} there" if name in masters else "absent"
                raise WeightError(
                    f"parameter {name} is {list(live.shape)} in rank {self._rank} of the engine, {found} in "
                    "that of the trainer"
                )
        self._masters, self._sums = masters, sums.numpy().copy()
        self._check_held(manifest)

    def _verify(self, manifest: WeightManifest, held: dict[str, torch.Tensor], deadline: Deadline) -> None:
        """Compare this rank's pieces, converted, with the published sums, and these with the digests.

        Raises:
            WeightError: naming a tensor that differs.
        """
        rows = PieceRows(manifest)
        pieces = [piece for part in manifest.parts for piece in part.pieces]
        firsts = [first for part in rows.pieces for first, _ in part]
        counts = [[end - first for first, end in part] for part in rows.pieces]
        starts = list(accumulate(chain.from_iterable(counts), initial=0))
        sums, own = SliceSums(starts[-1], next(iter(held.values())).device), []
        for number, part in enumerate(self._model.pieces(held)):
            if part is not None:
                entry = manifest.tensors[pieces[number].tensor]
                deadline.remaining(f"reading {entry.name}")
                self._refuse_cancelled(manifest)
                converted = part.to(self._dtype).contiguous()
                sums.add(converted, entry.shape, pieces[number].box, starts[number] - firsts[number])
                own.append((entry.name, slice(starts[number], starts[number + 1])))
        sums.launch()
        found = sums.total.cpu().numpy()
        for name, place in own:
            if not np.array_equal(found[place], self._sums[place]):
                raise WeightError(f"tensor {name}: rank {self._rank} does not hold what was published")
        ends = accumulate(map(sum, counts))
        by_rank = np.split(self._sums, list(ends)[:-1])
        version_digest(manifest, rows.digests(by_rank))

    def _check_held(self, manifest: WeightManifest) -> None:
        if self._held is None or int(self._held) != manifest.version:
            raise WeightError(
                f"version {manifest.version} is not held by the trainer any more: "
                "it computes the next one, or has ended"
            )


class SharedRankPlan:
    """Plan of live weights that the trainer computes with, too, for `RankStaging`."""

    def __init__(self, model: CachedModel, rank: int) -> None:
        self._model, self._rank = model, rank
        self.live = model.parameters
        self.unplaced: Sequence[str] = ()
        self._staging: SharedRankStaging | None = None

    def calibrate(self) -> None:
        """Return at once: there is no copy, and the trainer compares every bit when it attaches."""

    def staging(self, *, architecture: str, tied: bool) -> SharedRankStaging:
        """Create the staging that `apply` commits from."""
        self._staging = SharedRankStaging(self._model, self._rank, architecture=architecture, tied=tied)
        return self._staging

    def gathered(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Yield (name, tensor, whether this rank holds all of it); what it does not hold is zero."""
        pieces = [piece for part in self._model.published() for piece in part]
        held = list(self._model.pieces(self.live))
        for index, (name, shape) in enumerate(self._model.shapes.items()):
            found = [(piece, part) for piece, part in zip(pieces, held, strict=True) if piece.tensor == index]
            tensor = torch.zeros(shape, dtype=next(iter(self.live.values())).dtype)
            for piece, part in found:
                if part is not None:
                    tensor[tuple(slice(*side) for side in piece.box)] = part
            yield name, tensor, all(part is not None for _, part in found)

    def apply(self) -> None:
        """Commit the version that was taken from the staging. Raises WeightError, see `SharedRankStaging`."""
        assert self._staging is not None
        self._staging.apply()

    def release(self) -> None:
        """Raise EngineError: the trainer computes with this memory."""
        raise EngineError("the trainer computes with the live weights: their memory cannot be released")

    def restore(self) -> None:
        """Return at once: no memory was released."""

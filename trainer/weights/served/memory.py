"""Holds a rank's pieces of each version, the way its transport needs them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from protocol.device.bucket_handles import buckets_on
from protocol.device.cut_memory import dtype_of, pieces_in
from protocol.device.pair_group import ALONE, BACKENDS
from protocol.errors import SettingsError
from protocol.messages import WeightManifest
from protocol.weights.boxes import shape_of
from protocol.weights.slices import BucketSizes, piece_places
from trainer.config import WeightConfig
from trainer.weights.served.double_buffer import DoubleBuffer
from trainer.weights.served.ipc_handles import HandleChannel
from trainer.weights.served.nccl_pairs import PairChannel
from trainer.weights.served.version_server import SenderChannel, ServedVersion


class PartMemory:
    """Memory of one rank's pieces, and how engines get at them."""

    can_draft: bool
    """Whether a version may be received while it is made."""
    where: str
    """Follows HOST:PORT in the location, for the receiver."""

    def __init__(self, config: WeightConfig, part: int) -> None:
        """Hold the pieces of rank `part`; in host memory where `config.backend` is gloo.

        Raises:
            SettingsError: `config.backend` is unknown, or cannot be used here.
        """
        self.backend, self.device = backend_of(config)
        self.part = part
        bucket_bytes = config.bucket_mb << 20
        self.sizes = BucketSizes(bucket_bytes, min(bucket_bytes, ALONE[self.backend]))

    def new(self, manifest: WeightManifest) -> ServedVersion:
        """Return a version without pieces, which `ServedVersion.streamed` gets.

        Raises:
            WeightError, OutOfMemoryError: there is no memory for it.
        """
        raise NotImplementedError

    def piece(self, served: ServedVersion, number: int) -> torch.Tensor:
        """Return where a piece of it goes: dense memory, in the order of the part's pieces."""
        raise NotImplementedError

    def channel(self) -> SenderChannel:
        """Return what serves a connection."""
        raise NotImplementedError

    def published(self) -> None:
        """Keep the version that was made last when the next one is."""

    def close(self) -> None:
        """Release what outlives its tensors; idempotent."""


class SentPieces(PartMemory):
    """Pieces that are sent through process groups; a version lives as long as it is current or being sent."""

    can_draft = True

    def __init__(self, config: WeightConfig, blank: WeightManifest, part: int) -> None:
        super().__init__(config, part)
        self.where = self.backend

    def new(self, manifest: WeightManifest) -> ServedVersion:
        return ServedVersion(manifest)

    def piece(self, served: ServedVersion, number: int) -> torch.Tensor:
        piece = served.manifest.parts[self.part].pieces[number]
        dtype = dtype_of(served.manifest, piece.tensor)
        return torch.empty(shape_of(piece.box), dtype=dtype, device=self.device)

    def channel(self) -> SenderChannel:
        return PairChannel(self.device, self.part, self.sizes)


class PieceMemory(NamedTuple):
    """Memory of one version."""

    buckets: tuple[torch.Tensor, ...]
    pieces: Sequence[torch.Tensor]
    """Places of the pieces in these, in their shapes."""


class MappedPieces(PartMemory):
    """Pieces of the current version and the one before it, in buckets that engines map.

    On a GPU these are mapped by CUDA IPC handles; without one they are anonymous files.
    """

    can_draft = False

    def __init__(self, config: WeightConfig, blank: WeightManifest, part: int) -> None:
        super().__init__(config, part)
        self.where = self.device.type
        self._buckets = buckets_on(self.device)
        self._timeout_s = config.timeout_s
        nbytes, places = piece_places(blank, part, self.sizes.bucket_bytes)

        def allocate() -> PieceMemory:
            buckets = tuple(map(self._buckets.empty, nbytes))
            return PieceMemory(buckets, pieces_in(buckets, places, blank, part))

        self._versions = DoubleBuffer(allocate)
        self._pieces: Sequence[torch.Tensor] = ()
        """Places of the pieces of the version that was made last."""

    def new(self, manifest: WeightManifest) -> ServedVersion:
        lease = self._versions.take(self._timeout_s)
        self._pieces = lease.memory.pieces
        return ServedVersion(manifest, lease.memory.buckets, lease.reading)

    def piece(self, served: ServedVersion, number: int) -> torch.Tensor:
        return self._pieces[number]

    def published(self) -> None:
        self._versions.published()

    def channel(self) -> SenderChannel:
        return HandleChannel(self._buckets, self.part, self.sizes)

    def close(self) -> None:
        self._buckets.close()


MEMORIES: dict[str, Callable[[WeightConfig, WeightManifest, int], PartMemory]] = {
    "ipc": MappedPieces,
    "nccl": SentPieces,
}
"""Transport -> where a rank's pieces are."""


def backend_of(config: WeightConfig) -> tuple[str, torch.device]:
    """Return the backend of the process groups, and where versions lie.

    Raises:
        SettingsError: the backend is unknown, or cannot be used here.
    """
    backend = config.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend not in BACKENDS:
        raise SettingsError(f"weights.backend {backend!r}: use gloo (CPU) or nccl (GPU)")
    if backend == "gloo":
        return backend, torch.device("cpu")
    if not torch.cuda.is_available():
        raise SettingsError("weights.backend 'nccl': there is no GPU here; use gloo")
    return backend, torch.device("cuda", torch.cuda.current_device())

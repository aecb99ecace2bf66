"""Stores a rank's pieces of each version, in the form that the transport requires."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from protocol.device.bucket_handles import buckets_on
from protocol.device.cut_memory import dtype_of, pieces_in
from protocol.device.pair_group import ALONE_BYTES_OF_BACKEND, BACKENDS
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
    """Memory of one rank's pieces, and access to it for engines."""

    can_draft: bool
    """Whether engines may receive a version while it is being exported."""
    where: str
    """Suffix of HOST:PORT in the location, for the receiver."""

    def __init__(self, config: WeightConfig, part: int) -> None:
        """Create the memory for the pieces of rank `part`, in host memory if `config.backend` is gloo.

        Raises:
            SettingsError: `config.backend` is unknown, or unsupported here.
        """
        self.backend, self.device = backend_of(config)
        self.part = part
        bucket_bytes = config.bucket_mb << 20
        self.sizes = BucketSizes(bucket_bytes, min(bucket_bytes, ALONE_BYTES_OF_BACKEND[self.backend]))

    def new(self, manifest: WeightManifest) -> ServedVersion:
        """Return a version without pieces; the caller adds the pieces to `ServedVersion.streamed`.

        Raises:
            WeightError, OutOfMemoryError: the memory cannot be allocated.
        """
        raise NotImplementedError

    def piece(self, served: ServedVersion, number: int) -> torch.Tensor:
        """Return the destination of a piece: dense memory, in the order of the part's pieces."""
        raise NotImplementedError

    def channel(self) -> SenderChannel:
        """Return the channel for a new connection."""
        raise NotImplementedError

    def published(self) -> None:
        """Keep the last created version until the next version is published."""

    def close(self) -> None:
        """Release resources other than tensors; idempotent."""


class SentPieces(PartMemory):
    """Pieces sent through process groups; a version lives while it is current or being sent."""

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
    """Views of the pieces in the buckets, in their shapes."""


class MappedPieces(PartMemory):
    """Pieces of the current and the previous version, in buckets that engines map.

    On a GPU, engines map the buckets by CUDA IPC handles; otherwise the buckets are anonymous files.
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
        """Destinations of the pieces of the last created version."""

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
"""Transport -> memory of a rank's pieces."""


def backend_of(config: WeightConfig) -> tuple[str, torch.device]:
    """Return the backend of the process groups, and the device of versions.

    Raises:
        SettingsError: the backend is unknown, or unsupported here.
    """
    backend = config.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend not in BACKENDS:
        raise SettingsError(f"weights.backend {backend!r}: use gloo (CPU) or nccl (GPU)")
    if backend == "gloo":
        return backend, torch.device("cpu")
    if not torch.cuda.is_available():
        raise SettingsError("weights.backend 'nccl': there is no GPU here; use gloo")
    return backend, torch.device("cuda", torch.cuda.current_device())

"""From the bytes of a manifest's entries to verified tensors: what all receivers share."""

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from protocol.device.digests import Digests, digests_of
from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.buckets import Chunk, manifest_digest
from protocol.weights.provisional import is_provisional, with_digests
from rollout.weights.base import Destination

POLL_S = 0.0005
"""Between two looks at a stream."""
AHEAD = 4
"""Pieces that are on their way at a time."""


class Deadline:
    """A point in time by which a version must have arrived."""

    def __init__(self, manifest: WeightManifest, seconds: float) -> None:
        self._what = f"version {manifest.version} over {manifest.transport}"
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self, doing: str) -> float:
        """Seconds left.

        Raises:
            WeightError: if none are; says what was being done.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise WeightError(f"{self._what}: not complete within {self._seconds:g} s while {doing}")
        return left


def in_buckets(manifest: WeightManifest) -> Iterator[tuple[int, Sequence[TensorEntry]]]:
    """Every bucket with its entries in the order of their offsets."""
    entries: list[list[TensorEntry]] = [[] for _ in manifest.buckets]
    for entry in sorted(manifest.tensors, key=lambda e: (e.bucket, e.offset)):
        entries[entry.bucket].append(entry)
    yield from enumerate(entries)


def destination_of(piece: Chunk, device: torch.device, place: Destination) -> torch.Tensor | None:
    """Where the bytes of a piece belong, [bytes] uint8: the place of its tensor, if it is one and has one on
    this device."""
    target = place(piece.entries[0]) if len(piece.entries) == 1 else None
    return target.view(-1).view(torch.uint8) if target is not None and target.device == device else None


def view(entry: TensorEntry, bucket: torch.Tensor, start: int = 0) -> torch.Tensor:
    """The tensor of `entry` as a view of its bucket from `start` on, a uint8 tensor whose storage is aligned.

    Raises:
        WeightError: if the entry's offset is not aligned for its dtype.
    """
    try:
        offset = entry.offset - start
        return bucket[offset : offset + entry.nbytes].view(getattr(torch, entry.dtype)).view(entry.shape)
    except RuntimeError as error:
        raise WeightError(f"tensor {entry.name} at offset {entry.offset}: {error}") from error


def verify(entry: TensorEntry, tensor: torch.Tensor) -> None:
    """Compare the bytes of a tensor on the host with the digest of its entry.

    Raises:
        WeightError: naming the tensor.
    """
    _compare(entry, digests_of([tensor])[0])


class Verification:
    """Compares the tensors of a version with their digests: those on the host at once, those on a GPU all
    together at the end.

    Of a draft it finds out the digests in the same way.
    """

    def __init__(self, manifest: WeightManifest) -> None:
        self._manifest = manifest
        self._found: dict[str, int] | None = {} if is_provisional(manifest) else None
        """Of a draft."""
        self._later: list[TensorEntry] = []
        self._digests = Digests()
        """Of `_later`."""

    def add(self, entry: TensorEntry, tensor: torch.Tensor) -> None:
        """Take a tensor; one on a GPU is held, and nothing may overwrite it before `finish`.

        Raises:
            WeightError: naming the tensor, if its bytes are others.
        """
        if tensor.is_cuda:
            self._later.append(entry)
            self._digests.add(tensor)
        else:
            self._note(entry, digests_of([tensor])[0])

    def finish(self, deadline: Deadline, gone: Callable[[], bool] = lambda: False) -> int:
        """Wait until all that is queued on the current stream is done, and compare what has not been
        compared.

        Returns: the digest of the version.

        Args:
            deadline: of the version.
            gone: whether the other side has died, so that what is queued will never be done.

        Raises:
            WeightError: naming the tensor; or it did not come.
        """
        if self._later:
            self._compare_later(deadline, gone)
        else:
            self._refuse_if(gone)
        if self._found is None:
            return self._manifest.digest
        return manifest_digest(
            with_digests(
                self._manifest, [self._found[entry.name] for entry in self._manifest.tensors]
            ).tensors
        )

    def _compare_later(self, deadline: Deadline, gone: Callable[[], bool]) -> None:
        self._digests.launch()
        queued = torch.cuda.Event()
        queued.record()
        while not queued.query():  # not `synchronize`: no deadline reaches the driver
            deadline.remaining("receiving")
            self._refuse_if(gone)
            time.sleep(POLL_S)
        self._refuse_if(gone)  # who has hung up may have written over what was read
        for entry, found in zip(self._later, self._digests.numbers(), strict=True):
            self._note(entry, found)

    def _note(self, entry: TensorEntry, found: int) -> None:
        if self._found is None:
            _compare(entry, found)
        else:
            self._found[entry.name] = found

    def _refuse_if(self, gone: Callable[[], bool]) -> None:
        if gone():
            raise WeightError(f"version {self._manifest.version}: the sender hung up in the middle")


def _compare(entry: TensorEntry, found: int) -> None:
    if found != entry.digest:
        raise WeightError(
            f"tensor {entry.name}: digest {found:016x} of the bytes that arrived, expected {entry.digest:016x}"
        )

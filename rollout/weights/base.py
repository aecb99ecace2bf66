"""Defines the interface of receivers; `registry.py` has them by transport."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch

from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.boxes import Box
from protocol.weights.slices import Wanted

Destination = Callable[[str, Box], torch.Tensor | None]
"""Returns where a slice of a tensor is to be staged, by name and box: memory of its dtype and shape, dense or
not, that no other tensor of the version uses. It keeps these elements until the next version, or `close` of
the receiver, and can be read then. None if the slice has to be divided or copied to several places."""


def no_destination(name: str, box: Box) -> torch.Tensor | None:
    """Return None: a `Destination` that knows none."""
    return None


class ReceivedSlice(NamedTuple):
    """Received elements of a tensor."""

    entry: TensorEntry
    box: Box
    tensor: torch.Tensor
    """Just these elements, in their shape."""


class WeightReceiver(Protocol):
    """Fetches slices of a version. Lives in the process that holds the engine's parameters."""

    @property
    def lasting(self) -> bool:
        """Whether slices are whole tensors in host memory, valid until the next version is received."""

    @property
    def lockable(self) -> bool:
        """Whether pages of the slices received last can be locked without a copy of them."""

    @property
    def digest(self) -> int:
        """`manifest_digest` of the version received last, computed from its bytes if it was provisional."""

    def slices(
        self,
        manifest: WeightManifest,
        wanted: Wanted,
        deadline_s: float,
        place: Destination = no_destination,
    ) -> Iterator[list[ReceivedSlice]]:
        """Yield every wanted element once, on any device: many slices at a time, valid until the next ones.

        Transports that read whole tensors yield elements that are not wanted, too. Every whole tensor is
        verified against its digest only once the iterator has ended without an error. Work on a slice must be
        queued on the current stream. Connections are kept for the next version.

        Args:
            manifest: the version.
            wanted: disjoint boxes of its tensors.
            deadline_s: seconds within which all of it must have been received.
            place: a receiver that copies a slice anyway may copy it there if it is dense, and then yields
                that very memory.

        Raises:
            WeightError: bytes are missing or wrong, or not there within `deadline_s`; names the tensor.
                Transports that cannot send a version during its export raise it for a provisional manifest.
        """

    def close(self) -> None:
        """Release the receiver's resources, and end a `slices` that runs in another thread.

        Idempotent; the receiver may be used again.
        """


def whole_tensor(entry: TensorEntry, tensor: torch.Tensor) -> list[ReceivedSlice]:
    """Return a tensor that was received whole."""
    return [ReceivedSlice(entry, tuple((0, n) for n in entry.shape), tensor)]

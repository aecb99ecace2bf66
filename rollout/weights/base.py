"""Defines the interface of receivers; `registry.py` lists them by transport."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch

from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.boxes import Box
from protocol.weights.slices import Wanted

Destination = Callable[[str, Box], torch.Tensor | None]
"""(name, box) -> staging memory for a slice of a tensor, with its dtype and shape, dense or not, used by no
other tensor of the version. The memory keeps these elements, and may be read, until the next version or until
`close` of the receiver. None if the slice must be split or copied to several places."""


def no_destination(name: str, box: Box) -> torch.Tensor | None:
    """Return None: a `Destination` without any destinations."""
    return None


class ReceivedSlice(NamedTuple):
    """Received elements of a tensor."""

    entry: TensorEntry
    box: Box
    tensor: torch.Tensor
    """The elements in the box, in the box's shape."""


class WeightReceiver(Protocol):
    """Receiver of slices of a version. Lives in the process with the engine's parameters."""

    @property
    def is_persistent(self) -> bool:
        """Whether slices are whole tensors in host memory, valid until the next version is received."""

    @property
    def is_lockable(self) -> bool:
        """Whether pages of the last received slices can be locked without copying them."""

    @property
    def digest(self) -> int:
        """`manifest_digest` of the last received version, computed from its bytes if it was provisional."""

    def slices(
        self,
        manifest: WeightManifest,
        wanted: Wanted,
        deadline_s: float,
        place: Destination = no_destination,
    ) -> Iterator[list[ReceivedSlice]]:
        """Yield every wanted element once, on any device, in batches that are valid until the next batch.

        Transports that read whole tensors also yield unwanted elements. Tensors count as verified against
        their digests only after the iterator has ended without an error. Queue work on a slice on the current
        stream. Connections are kept for the next version.

        Args:
            wanted: disjoint boxes of the version's tensors.
            deadline_s: timeout for receiving everything, seconds.
            place: optional destinations. A receiver that copies a slice anyway may copy it to a dense
                destination, and then yields that memory.

        Raises:
            WeightError: bytes are missing, wrong or late; the message names the tensor. For a provisional
                manifest:
                the transport cannot send a version during its export.
        """

    def close(self) -> None:
        """Release the receiver's resources, and end a `slices` that runs in another thread.

        Idempotent; the receiver may be used again.
        """


def whole_tensor(entry: TensorEntry, tensor: torch.Tensor) -> list[ReceivedSlice]:
    """Return a tensor that was received whole as a slice."""
    return [ReceivedSlice(entry, tuple((0, n) for n in entry.shape), tensor)]

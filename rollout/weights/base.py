"""Defines the interface of receivers; each has a sender in a module of the same name in trainer/weights/."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from protocol.messages import TensorEntry, WeightManifest

Destination = Callable[[TensorEntry], torch.Tensor | None]
"""Returns where a tensor is to be staged: dense memory of its dtype and shape that nothing else of the
version uses; None if the tensor has to be split."""


def no_destination(entry: TensorEntry) -> torch.Tensor | None:
    """Return None: a `Destination` that knows none."""
    return None


class WeightReceiver(Protocol):
    """Fetches the tensors of a version. Lives in the process that holds the engine's parameters."""

    @property
    def digest(self) -> int:
        """`manifest_digest` of the version received last, computed from its bytes if it was provisional."""

    def tensors(
        self, manifest: WeightManifest, deadline_s: float, place: Destination = no_destination
    ) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Yield every entry once with its bytes as a tensor, on any device.

        A tensor is valid until the next one is requested. Tensors are verified against their digests only
        once the iterator has ended without an error. Work on a tensor must be queued on the current stream.
        Connections are kept for the next version.

        Args:
            manifest: the version.
            deadline_s: seconds within which all of it must have been received.
            place: a receiver that copies a tensor anyway may copy it there, and then yields that very memory.

        Raises:
            WeightError: bytes are missing or wrong, or not there within `deadline_s`; names the tensor.
                Transports that cannot send a version during its export raise it for a provisional manifest.
        """

    def close(self) -> None:
        """Release what the receiver holds, and end a `tensors` that runs in another thread.

        Idempotent; the receiver may be used again.
        """

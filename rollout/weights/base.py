"""The receiving side of a weight transport: one file for each transport, with the same name as in
`trainer/weights/`."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from protocol.messages import TensorEntry, WeightManifest

Destination = Callable[[TensorEntry], torch.Tensor | None]
"""Where a tensor belongs: dense memory of its dtype and shape that nothing else of the version touches; None
if it has to be cut up."""


def no_destination(entry: TensorEntry) -> torch.Tensor | None:
    """A `Destination` that knows none."""
    return None


class WeightReceiver(Protocol):
    """Fetches the tensors of a version. Lives in the process that holds the engine's parameters."""

    @property
    def digest(self) -> int:
        """Of the version that came last (`manifest_digest`): that of its manifest, but for a draft, whose
        digests only the bytes tell."""

    def tensors(
        self, manifest: WeightManifest, deadline_s: float, place: Destination = no_destination
    ) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Yield every entry once with its bytes as a tensor, on any device, valid until the next one is asked
        for.

        When the iterator has ended without an error every tensor was verified against its digest; on a GPU
        not before. Work on a tensor must be queued on the stream that is current. What is connected stays so
        for the next version.

        Args:
            manifest: what is wanted.
            deadline_s: seconds until the version has to be there.
            place: a receiver that would copy a tensor anyway may put it there, and yields that very
                memory then.

        Raises:
            WeightError: missing, truncated or wrong bytes, or not complete within `deadline_s`; names the
                tensor. Transports that
                cannot send a version while it is made find the bytes of a draft wrong.
        """

    def close(self) -> None:
        """Release what the receiver holds, and end a `tensors` that runs in another thread; idempotent. It
        may be used again."""

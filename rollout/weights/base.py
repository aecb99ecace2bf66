"""The receiving side of a weight transport: one file for each transport, with the same name as in `trainer/weights/`."""

from collections.abc import Iterator
from typing import Protocol

import torch

from protocol.messages import TensorEntry, WeightManifest


class Receiver(Protocol):
    """Fetches the tensors of a version. Lives in the process that holds the engine's parameters."""

    def tensors(self, manifest: WeightManifest, deadline_s: float) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Yield every entry once with its bytes as a tensor, verified against its digest, valid until the next one is asked for.

        Raises:
            WeightError: missing, truncated or wrong bytes, or not complete within `deadline_s`; names the tensor.
        """

    def close(self) -> None:
        """Release what the receiver holds; idempotent."""

"""The sending side of a weight transport: one file for each transport, with the same name as in `rollout/weights/`."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from protocol.messages import WeightManifest


@dataclass(frozen=True, slots=True)
class WeightConfig:
    """Section `[weights]`."""

    transport: str = "shm"
    """Module in `trainer/weights/` and `rollout/weights/`: shm, disk, nccl."""
    directory: str = ""
    """shm and disk: where versions are written; by default /dev/shm/tether-RUN-NONCE and RUN_DIR/weights."""
    bucket_mb: int = 64
    keep: int = 2
    """Versions kept for engines that are late; the newest is always kept."""
    host: str = "127.0.0.1"
    """nccl: address on which the trainer's rendezvous listens."""
    backend: str = "gloo"
    """nccl: process group backend; "gloo" on CPU, "nccl" on GPU."""
    timeout_s: float = 60.0


class Sender(Protocol):
    """Publishes versions. Lives in trainer rank 0."""

    def publish(
        self,
        epoch: str,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        base_model: str = "",
        tied: tuple[tuple[str, str], ...] = (),
    ) -> WeightManifest:
        """Make a version available and return its manifest. When it returns, the tensors may be written again.

        Raises:
            WeightError: nothing was published; what was written is removed.
        """

    def retire(self, in_use: frozenset[int]) -> None:
        """Forget versions that are neither in `in_use` nor among the newest `keep`."""

    def close(self) -> None:
        """Remove everything published that does not outlive the run; idempotent."""

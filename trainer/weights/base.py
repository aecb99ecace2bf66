"""The sending side of a weight transport: one file for each transport, with the same name as in
`rollout/weights/`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from protocol.messages import WeightDraft, WeightManifest

if TYPE_CHECKING:  # the registry, which every reader of settings imports, must not import torch
    import torch


class WeightSender(Protocol):
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
        """Make a version available and return its manifest. When it returns, the tensors may be written
        again; with `shared`, when the engine serves it.

        Raises:
            WeightError: nothing was published; what was written is removed.
        """

    def retire(self, in_use: frozenset[int]) -> None:
        """Forget versions that are neither in `in_use` nor among the newest `keep`."""

    def close(self) -> None:
        """Remove everything published that does not outlive the run; idempotent."""


@runtime_checkable
class StreamingSender(WeightSender, Protocol):
    """Sends a version while it is made."""

    def provisional(self, epoch: str, version: int) -> WeightDraft | None:
        """Be asked for a version from now on, which `publish` is about to make; None if that has to wait for
        its manifest.

        Engines get what `publish` has made so far, and wait for the rest. If it fails, or makes another
        version, they are hung up on.
        """

"""Defines the interface of senders; `registry.py` has them by transport."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from protocol.messages import WeightDraft, WeightManifest

if TYPE_CHECKING:  # the registry, which every reader of settings imports, must not import torch
    import torch


class WeightSender(Protocol):
    """Publishes versions. Lives in trainer rank 0, and in the other ranks if each publishes a part."""

    in_parts: bool
    """Whether each of several ranks publishes its own pieces. Every method is called on all of them then, in
    the same order; otherwise on rank 0 alone, which publishes whole tensors."""

    def provisional(self, epoch: str, version: int) -> WeightDraft | None:
        """Accept requests for a version that the next `publish` will make, and return its announcement.

        Engines get what `publish` has made so far and wait for the rest. If it fails, or makes another
        version, they are disconnected.

        Returns:
            None if the transport cannot do that, as by default, or there is no earlier version of the epoch,
            whose layout the announcement would name; engines then wait for the manifest.
        """
        return None

    def publish(
        self, epoch: str, version: int, tensors: Iterable[tuple[str, torch.Tensor]], *, base_model: str = ""
    ) -> WeightManifest:
        """Make a version available to engines and return its manifest.

        When it returns, the tensors may be written to; with `shared`, only once the engine serves the
        version.

        Args:
            epoch: epoch of the trainer.
            version: number of the version.
            tensors: (Hugging Face name, tensor) in the order of export, or this rank's pieces; consumed to
                the end also on a WeightError.
            base_model: architecture name from the model's config.json.

        Returns:
            The manifest; on ranks other than 0 without digests.

        Raises:
            WeightError: on rank 0: the version was not published, and its bytes have been removed.
        """

    def retire(self, in_use: frozenset[int]) -> None:
        """Remove versions that are neither in `in_use` nor among the newest `keep`."""

    def close(self) -> None:
        """Remove all versions that do not outlive the run; idempotent."""

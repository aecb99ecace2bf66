"""Defines the interface of senders; `registry.py` lists senders by transport."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from protocol.messages import WeightDraft, WeightManifest

if TYPE_CHECKING:  # processes that read settings import the registry, which must not import torch
    import torch


class WeightSender(Protocol):
    """Publisher of versions, on trainer rank 0, and on the other ranks if each rank publishes a part."""

    in_parts: bool
    """Whether each of several ranks publishes its own pieces. If so, every rank calls every method, in the
    same order; otherwise only rank 0, which publishes whole tensors."""

    def provisional(self, epoch: str, version: int) -> WeightDraft | None:
        """Accept requests for the version of the next `publish`, and return its announcement.

        Engines receive the tensors published so far and wait for the rest. If `publish` fails or publishes
        another version, the engines are disconnected.

        Returns:
            None if the transport does not support early requests (default), or the epoch has no earlier
            version whose layout the announcement could name. Engines then wait for the manifest.
        """
        return None

    def publish(
        self, epoch: str, version: int, tensors: Iterable[tuple[str, torch.Tensor]], *, base_model: str = ""
    ) -> WeightManifest:
        """Make a version available to engines and return its manifest.

        Afterwards the tensors may be overwritten; with `shared`, only after the engine serves the version.

        Args:
            tensors: (Hugging Face name, tensor) in export order, or this rank's pieces. Exhausted even on a
                WeightError.
            base_model: architecture name from the model's config.json.

        Returns:
            The manifest; without digests on ranks other than 0.

        Raises:
            WeightError: on rank 0: the version was not published, and its bytes have been removed.
        """

    def retire(self, in_use: frozenset[int]) -> None:
        """Remove versions that are neither in `in_use` nor among the newest `keep` versions."""

    def close(self) -> None:
        """Remove all versions that do not outlive the run; idempotent."""

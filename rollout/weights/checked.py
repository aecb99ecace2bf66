"""Checks a manifest before a receiver fetches its version; inconsistent manifests are refused."""

from collections.abc import Iterator

from protocol.messages import WeightManifest
from protocol.weights.buckets import check_digest, check_layout, layout_digest
from protocol.weights.slices import Wanted, check_parts
from rollout.weights.base import Destination, ReceivedSlice, WeightReceiver, no_destination


class ManifestCheck:
    """Checker of manifests; a layout that passed is not checked again.

    Checking the layout of 36,000 tensors in pieces takes 55 ms of a core that the engine's steps also need.
    """

    def __init__(self) -> None:
        self._passed: int | None = None
        """`layout_digest` of the last valid manifest."""

    def __call__(self, manifest: WeightManifest) -> None:
        """Refuse an inconsistent manifest.

        Raises:
            WeightError: see `check_layout`, `check_parts` and `check_digest`.
        """
        layout = layout_digest(manifest)
        if layout != self._passed:
            check_layout(manifest)
            if manifest.parts:
                check_parts(manifest)
            self._passed = layout
        check_digest(manifest)


class CheckedReceiver:
    """Receiver that refuses an inconsistent manifest before fetching a byte."""

    def __init__(self, receiver: WeightReceiver) -> None:
        self._receiver = receiver
        self._check = ManifestCheck()

    def slices(
        self,
        manifest: WeightManifest,
        wanted: Wanted,
        deadline_s: float,
        place: Destination = no_destination,
    ) -> Iterator[list[ReceivedSlice]]:
        self._check(manifest)
        yield from self._receiver.slices(manifest, wanted, deadline_s, place)

    @property
    def digest(self) -> int:
        return self._receiver.digest

    @property
    def is_persistent(self) -> bool:
        return self._receiver.is_persistent

    @property
    def is_lockable(self) -> bool:
        return self._receiver.is_lockable

    def close(self) -> None:
        self._receiver.close()

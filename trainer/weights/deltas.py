"""Arranges versions in chains: an anchor with all bytes, followed by versions of changes only.

A chain has a maximum length. These versions also start a chain:

- the first version of a trainer process
- a version after one that could not be published
- after a rewind, a version that is older than the newest version, or whose directory would replace one in the
  newest version's chain
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from protocol.messages import WeightLink, WeightManifest
from protocol.weights.deltas import INDEX, NO_BASE, Delta
from trainer.weights.part_layout import PartReport


class VersionChain:
    """Anchor and deltas from which the newest version is read."""

    def __init__(self, anchor_every: int, *, per_rank_files: bool) -> None:
        """Start with an anchor.

        Args:
            anchor_every: maximum number of versions in a chain.
            per_rank_files: whether ranks also write anchors to files of their own.
        """
        self._anchor_every, self._per_rank_files = anchor_every, per_rank_files
        self._newest: WeightManifest | None = None
        """Version to compare the next version with; None: no version, or a version is being written."""
        self._base: WeightManifest | None = None
        """Base of the version that is being written; None: the version is an anchor."""

    def begin(self, version: int, name: str) -> bool:
        """Begin a version in the directory `name`; return whether it is written as changes.

        Unless the version is `published`, the next version is an anchor.
        """
        base, self._newest = self._newest, None
        is_changes = (
            base is not None
            and len(base.chain) < self._anchor_every
            and version >= base.version
            and all(link.directory != name for link in base.chain)
        )
        self._base = base if is_changes else None
        return is_changes

    def completed(self, manifest: WeightManifest, aside: Path, parts: Sequence[PartReport]) -> WeightManifest:
        """Write the index of changes into the version's directory; return the manifest with its chain.

        Args:
            aside: directory of the version.
            parts: reports of the ranks that wrote the version.

        Raises:
            OSError: the index cannot be written.
        """
        base, nbytes = self._base, sum(manifest.buckets)
        if base is not None or self._per_rank_files:
            nbytes = sum(part.nbytes for part in parts)
            changes = [change for part in parts for change in part.changes]
            delta = Delta(
                base=base.digest if base is not None else NO_BASE.digest,
                digest=manifest.digest,
                changes=tuple(sorted(changes, key=lambda change: (change.tensor, change.box))),
                sizes=tuple(part.nbytes for part in parts),
            )
            (aside / INDEX).write_bytes(msgspec.msgpack.encode(delta))
        name, apart = Path(manifest.location).name, base is None and self._per_rank_files
        links = base.chain if base is not None else ()
        return replace(manifest, chain=(*links, WeightLink(name, manifest.digest, nbytes, apart)))

    def published(self, manifest: WeightManifest) -> None:
        """Use this version as the base of the next version."""
        self._newest = manifest

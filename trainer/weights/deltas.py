"""Chains versions: every so many versions one is an anchor, of all bytes, and the others are changes.

A restarted trainer has no version to compare with and begins with an anchor, so does the version after one
that could not be published. A version is an anchor, too, if it is older than the newest, or its directory
would replace one of the newest one's chain: a trainer that goes back reaches versions a second time.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from protocol.messages import WeightLink, WeightManifest
from protocol.weights.deltas import INDEX, NOTHING, Delta
from trainer.weights.part_layout import PartReport


class VersionChain:
    """The anchor and the changes by which the newest version is read."""

    def __init__(self, anchor_every: int, *, apart: bool) -> None:
        """Begin with an anchor.

        Args:
            anchor_every: versions of a chain, at most.
            apart: ranks write to files of their own in anchors, too.
        """
        self._anchor_every, self._apart = anchor_every, apart
        self._newest: WeightManifest | None = None
        """The version to compare the next one with; None: there is none, or the next one is being written."""
        self._base: WeightManifest | None = None
        """The version that the one in the making changes; None: that is an anchor."""

    def begin(self, version: int, name: str) -> bool:
        """Begin a version in the directory of this name; return whether it is written as changes.

        Unless it is `published`, the next one is an anchor.
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
        """Describe the changes in the version's directory; return its manifest with its chain.

        Args:
            manifest: the version's.
            aside: its directory.
            parts: reports of the ranks that have written it.

        Raises:
            OSError: the description cannot be written.
        """
        base, nbytes = self._base, sum(manifest.buckets)
        if base is not None or self._apart:
            nbytes = sum(part.nbytes for part in parts)
            changes = [change for part in parts for change in part.changes]
            delta = Delta(
                base=base.digest if base is not None else NOTHING.digest,
                digest=manifest.digest,
                changes=tuple(sorted(changes, key=lambda change: (change.tensor, change.box))),
                sizes=tuple(part.nbytes for part in parts),
            )
            (aside / INDEX).write_bytes(msgspec.msgpack.encode(delta))
        name, apart = Path(manifest.location).name, base is None and self._apart
        links = base.chain if base is not None else ()
        return replace(manifest, chain=(*links, WeightLink(name, manifest.digest, nbytes, apart)))

    def published(self, manifest: WeightManifest) -> None:
        """Compare the next version with this one."""
        self._newest = manifest

"""Builds provisional manifests of versions that are still being exported; only their digests are missing.

An engine that stages a provisional version computes the digests itself, and commits the staged copy only if
its digest equals the final manifest's digest.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from protocol.messages.weights import WeightManifest

UNKNOWN = 0
"""Digest of the version and of every tensor in a provisional manifest. No version can be committed with this
digest: a final manifest with it contradicts its tensors."""


def provisional_manifest(manifest: WeightManifest, version: int) -> WeightManifest:
    """Return the provisional manifest of a later version with the layout of `manifest`."""
    return with_digests(replace(manifest, version=version, digest=UNKNOWN), [UNKNOWN] * len(manifest.tensors))


def is_provisional(manifest: WeightManifest) -> bool:
    """Return whether the digests of the manifest are unknown."""
    return manifest.digest == UNKNOWN and all(entry.digest == UNKNOWN for entry in manifest.tensors)


def with_digests(manifest: WeightManifest, digests: Sequence[int]) -> WeightManifest:
    """Return a copy with new digests of the tensors, in their order; the version's digest is unchanged."""
    entries = tuple(
        replace(entry, digest=digest) for entry, digest in zip(manifest.tensors, digests, strict=True)
    )
    return replace(manifest, tensors=entries)

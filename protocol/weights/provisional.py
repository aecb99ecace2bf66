"""Manifests of versions that are still being made: everything of a version is known but its digests.

An engine stages what comes under a draft, and computes the digests itself. Whether it is the version shows
when the manifest comes: a staged copy is committed only if its digest is the manifest's.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from protocol.messages.weights import WeightManifest

UNKNOWN = 0
"""Stands for every digest of a draft. No version can be committed under it: a manifest with this digest
contradicts its tensors."""


def provisional_manifest(manifest: WeightManifest, version: int) -> WeightManifest:
    """The manifest of a later version of the same sender, before its digests are known."""
    return with_digests(replace(manifest, version=version, digest=UNKNOWN), [UNKNOWN] * len(manifest.tensors))


def is_provisional(manifest: WeightManifest) -> bool:
    """Whether no digest is known."""
    return manifest.digest == UNKNOWN and all(entry.digest == UNKNOWN for entry in manifest.tensors)


def with_digests(manifest: WeightManifest, digests: Sequence[int]) -> WeightManifest:
    """The same with these digests of its tensors, in their order; that of the whole stays what it is."""
    entries = tuple(
        replace(entry, digest=digest) for entry, digest in zip(manifest.tensors, digests, strict=True)
    )
    return replace(manifest, tensors=entries)

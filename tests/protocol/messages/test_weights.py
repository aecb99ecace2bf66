"""Manifests of older releases are read."""

from msgspec.structs import replace

from protocol.codec import decode
from tests.protocol.samples import GOLDEN, SAMPLES


def test_manifest_of_an_older_release_has_no_parts() -> None:
    _, manifest = decode((GOLDEN / "weight_manifest.v2.without_parts.msgpack").read_bytes())
    assert manifest == replace(SAMPLES["weight_manifest"], parts=(), chain=())


def test_manifest_of_an_older_release_has_no_chain() -> None:
    _, manifest = decode((GOLDEN / "weight_manifest.v2.without_chain.msgpack").read_bytes())
    assert manifest == replace(SAMPLES["weight_manifest"], chain=())


def test_links_of_an_older_release_are_in_buckets() -> None:
    _, manifest = decode((GOLDEN / "weight_manifest.v2.without_apart.msgpack").read_bytes())
    expected = SAMPLES["weight_manifest"]
    assert manifest == replace(expected, chain=tuple(replace(link, apart=False) for link in expected.chain))


def test_tied_names_of_an_older_release_are_ignored() -> None:
    _, manifest = decode((GOLDEN / "weight_manifest.v2.with_tied.msgpack").read_bytes())
    assert manifest == SAMPLES["weight_manifest"]

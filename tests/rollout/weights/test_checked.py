"""The check before every receiver: a kept layout changes no answer."""

import msgspec
import pytest

from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest, WeightPiece
from protocol.messages.weights import WeightPart
from protocol.weights.buckets import manifest_digest
from rollout.weights.checked import ManifestCheck

A = TensorEntry("a", "float32", (2,), 0, 0, 8, 1)
B = TensorEntry("b", "bfloat16", (4,), 0, 8, 8, 2)
WHOLE = (WeightPart("x", (WeightPiece(0, ((0, 2),)), WeightPiece(1, ((0, 4),)))),)
HALF = (WeightPart("x", (WeightPiece(0, ((0, 2),)), WeightPiece(1, ((0, 2),)))),)


def version(number: int, *entries: TensorEntry, parts: tuple[WeightPart, ...] = ()) -> WeightManifest:
    return WeightManifest(
        epoch="e1",
        version=number,
        transport="nccl",
        location="x",
        buckets=(16,),
        tensors=entries,
        digest=manifest_digest(entries),
        parts=parts,
    )


def with_digest(entry: TensorEntry, digest: int) -> TensorEntry:
    return msgspec.structs.replace(entry, digest=digest)


def test_versions_of_one_layout_pass_whatever_their_digests() -> None:
    check = ManifestCheck()
    for number in range(3):
        check(version(number, with_digest(A, number + 5), B, parts=WHOLE))


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (version(2, A, msgspec.structs.replace(B, offset=4), parts=WHOLE), "overlaps"),
        (version(2, A, msgspec.structs.replace(B, nbytes=4), parts=WHOLE), "is not 4 bytes"),
        (version(2, A, B, parts=HALF), "do not cover"),
        (msgspec.structs.replace(version(2, A, B, parts=WHOLE), buckets=(8,)), "exceeds bucket"),
        (msgspec.structs.replace(version(2, A, B, parts=WHOLE), digest=3), "digest does not match"),
    ],
)
def test_a_later_manifest_is_refused_for_what_changed(second: WeightManifest, words: str) -> None:
    check = ManifestCheck()
    check(version(1, A, B, parts=WHOLE))
    for _ in range(2):  # a refused layout is not kept as one that passed
        with pytest.raises(WeightError, match=words):
            check(second)
    check(version(3, A, B, parts=WHOLE))

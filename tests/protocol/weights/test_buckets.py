import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.buckets import (
    ALIGNMENT,
    ALONE_BYTES,
    check_manifest,
    chunks,
    manifest_digest,
    plan_buckets,
)

SIZES = st.lists(st.integers(0, 500), max_size=30)


@given(SIZES, st.integers(1, 1000))
def test_plan_places_every_tensor_once_without_overlap(sizes: list[int], bucket_bytes: int) -> None:
    placements, buckets = plan_buckets(((f"t{i}", n) for i, n in enumerate(sizes)), bucket_bytes)
    assert [p.name for p in placements] == [f"t{i}" for i in range(len(sizes))]
    end: dict[int, int] = {}
    for p in placements:
        assert p.offset % ALIGNMENT == 0
        assert p.offset >= end.get(p.bucket, 0)
        end[p.bucket] = p.offset + p.nbytes
        assert end[p.bucket] <= buckets[p.bucket]
    assert sum(buckets) < sum(sizes) + ALIGNMENT * (len(sizes) + 1)


@given(SIZES, st.integers(1, 1000))
def test_a_bucket_is_over_the_limit_only_for_one_large_tensor(sizes: list[int], bucket_bytes: int) -> None:
    placements, buckets = plan_buckets(((f"t{i}", n) for i, n in enumerate(sizes)), bucket_bytes)
    for index, size in enumerate(buckets):
        holding = [p for p in placements if p.bucket == index and p.nbytes]
        assert size <= bucket_bytes or len(holding) == 1


def test_plan_refuses_repeats_and_silly_sizes() -> None:
    with pytest.raises(ValueError, match="comes twice"):
        plan_buckets([("a", 1), ("a", 1)], 10)
    with pytest.raises(ValueError, match="positive"):
        plan_buckets([], 0)


def manifest(*entries: TensorEntry, buckets: tuple[int, ...] = (64,)) -> WeightManifest:
    return WeightManifest(
        epoch="e",
        version=1,
        transport="shm",
        location="/x",
        buckets=buckets,
        tensors=entries,
        digest=manifest_digest(entries),
    )


A = TensorEntry("a", "float32", (2,), 0, 0, 8, 1)
B = TensorEntry("b", "bfloat16", (4,), 0, 8, 8, 2)


def test_a_good_manifest_passes() -> None:
    check_manifest(manifest(A, B))


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ((A, msgspec.structs.replace(B, name="a")), "comes twice"),
        ((A, msgspec.structs.replace(B, offset=4)), "overlaps"),
        ((A, msgspec.structs.replace(B, offset=60)), "leaves bucket"),
        ((A, msgspec.structs.replace(B, bucket=1)), "leaves bucket"),
        ((A, msgspec.structs.replace(B, dtype="int3")), "not known"),
        ((A, msgspec.structs.replace(B, shape=(5,))), "is not 8 bytes"),
    ],
)
def test_contradictions_are_refused_and_named(entries: tuple[TensorEntry, ...], text: str) -> None:
    with pytest.raises(WeightError, match=text):
        check_manifest(manifest(*entries))


def test_an_edited_manifest_does_not_match_its_digest() -> None:
    with pytest.raises(WeightError, match="digest"):
        check_manifest(
            msgspec.structs.replace(manifest(A, B), tensors=(A, msgspec.structs.replace(B, digest=3)))
        )


def test_digest_ignores_order_and_buckets_but_not_content() -> None:
    moved = msgspec.structs.replace(A, bucket=1, offset=64)
    assert manifest_digest((A, B)) == manifest_digest((B, moved))
    for change in ({"digest": 9}, {"shape": (1, 2)}, {"name": "c"}, {"dtype": "int32"}):
        assert manifest_digest((msgspec.structs.replace(A, **change), B)) != manifest_digest((A, B))


@given(
    st.lists(
        st.sampled_from([0, 4, 1000, ALONE_BYTES - 1, ALONE_BYTES, 2 * ALONE_BYTES]), min_size=1, max_size=20
    ),
    st.sampled_from([ALONE_BYTES, 2 * ALONE_BYTES]),
)
def test_pieces_hold_every_tensor_once_and_the_large_ones_alone(sizes: list[int], alone: int) -> None:
    placements, buckets = plan_buckets(((f"t{i}", n) for i, n in enumerate(sizes)), 3 * ALONE_BYTES)
    entries = [TensorEntry(p.name, "uint8", (p.nbytes,), p.bucket, p.offset, p.nbytes, 0) for p in placements]
    found = chunks(manifest(*entries, buckets=tuple(buckets)), alone)
    assert sorted(entry.name for piece in found for entry in piece.entries) == sorted(
        f"t{i}" for i in range(len(sizes))
    )
    for piece in found:
        assert len(piece.entries) == 1 or all(entry.nbytes < alone for entry in piece.entries)
        for entry in piece.entries:
            assert entry.bucket == piece.bucket
            assert piece.start <= entry.offset
            assert entry.offset + entry.nbytes <= piece.end <= buckets[piece.bucket]
    assert all(a.bucket < b.bucket or a.end <= b.start for a, b in itertools.pairwise(found))

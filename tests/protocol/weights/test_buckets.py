"""The layout of buckets, and which manifests are refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.buckets import (
    ALIGNMENT,
    BucketLayout,
    check_digest,
    check_layout,
    layout_digest,
    manifest_digest,
)

SIZES = st.lists(st.integers(0, 500), max_size=30)
Placed = list[tuple[int, int]]


def laid_out(sizes: list[int], bucket_bytes: int) -> tuple[Placed, list[int]]:
    """(bucket, offset) of tensors t0, t1 ... of these sizes, and the bytes of each bucket."""
    layout = BucketLayout(bucket_bytes)
    placed = [layout.place(f"t{i}", size) for i, size in enumerate(sizes)]
    return placed, layout.buckets


def naive_layout(sizes: list[int], bucket_bytes: int) -> tuple[Placed, list[int]]:
    """The layout by hand: pad a bucket byte by byte to a multiple of 64, open another one if it is full."""
    placed: Placed = []
    buckets: list[int] = []
    for size in sizes:
        if buckets:
            offset = buckets[-1]
            while offset % 64:
                offset += 1
            if offset == 0 or offset + size <= bucket_bytes:
                placed.append((len(buckets) - 1, offset))
                buckets[-1] = offset + size
                continue
        placed.append((len(buckets), 0))
        buckets.append(size)
    return placed, buckets


@given(SIZES, st.integers(1, 1000))
def test_layout_is_that_of_the_naive_one(sizes: list[int], bucket_bytes: int) -> None:
    assert laid_out(sizes, bucket_bytes) == naive_layout(sizes, bucket_bytes)


def test_layout_of_golden_sizes() -> None:
    """Versions that were published before are read with the layout of today."""
    assert laid_out([100, 28, 1, 0, 300, 64, 200, 0], 256) == (
        [(0, 0), (0, 128), (0, 192), (0, 256), (1, 0), (2, 0), (3, 0), (3, 256)],
        [256, 300, 64, 256],
    )


@given(SIZES, st.integers(1, 1000))
def test_layout_places_every_tensor_without_overlap(sizes: list[int], bucket_bytes: int) -> None:
    placed, buckets = laid_out(sizes, bucket_bytes)
    end: dict[int, int] = {}
    for (bucket, offset), size in zip(placed, sizes, strict=True):
        assert offset % ALIGNMENT == 0
        assert offset >= end.get(bucket, 0)
        end[bucket] = offset + size
        assert end[bucket] <= buckets[bucket]
    assert sum(buckets) < sum(sizes) + ALIGNMENT * (len(sizes) + 1)


@given(SIZES, st.integers(1, 1000))
def test_a_bucket_is_over_the_limit_only_for_one_large_tensor(sizes: list[int], bucket_bytes: int) -> None:
    placed, buckets = laid_out(sizes, bucket_bytes)
    for index, total in enumerate(buckets):
        holding = [size for (bucket, _), size in zip(placed, sizes, strict=True) if bucket == index and size]
        assert total <= bucket_bytes or len(holding) == 1


def test_layout_refuses_a_repeated_name() -> None:
    layout = BucketLayout(10)
    layout.place("a", 1)
    with pytest.raises(WeightError, match="tensor a is duplicated"):
        layout.place("a", 1)


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
    check_layout(manifest(A, B))
    check_digest(manifest(A, B))


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ((A, msgspec.structs.replace(B, name="a")), "is duplicated"),
        ((A, msgspec.structs.replace(B, offset=4)), "overlaps"),
        ((A, msgspec.structs.replace(B, offset=60)), "exceeds bucket"),
        ((A, msgspec.structs.replace(B, bucket=1)), "exceeds bucket"),
        ((A, msgspec.structs.replace(B, dtype="int3")), "not known"),
        ((A, msgspec.structs.replace(B, shape=(5,))), "is not 8 bytes"),
    ],
)
def test_contradictions_are_refused_and_named(entries: tuple[TensorEntry, ...], text: str) -> None:
    with pytest.raises(WeightError, match=text):
        check_layout(manifest(*entries))


def test_an_edited_manifest_does_not_match_its_digest() -> None:
    with pytest.raises(WeightError, match="digest"):
        check_digest(
            msgspec.structs.replace(manifest(A, B), tensors=(A, msgspec.structs.replace(B, digest=3)))
        )


def test_digests_of_a_golden_manifest() -> None:
    assert manifest_digest((A, B)) == 1136723240673091959
    assert layout_digest(manifest(A, B)) == 13913204468367691254


def test_digest_ignores_order_and_buckets_but_not_content() -> None:
    moved = msgspec.structs.replace(A, bucket=1, offset=64)
    assert manifest_digest((A, B)) == manifest_digest((B, moved))
    for change in ({"digest": 9}, {"shape": (1, 2)}, {"name": "c"}, {"dtype": "int32"}):
        assert manifest_digest((msgspec.structs.replace(A, **change), B)) != manifest_digest((A, B))

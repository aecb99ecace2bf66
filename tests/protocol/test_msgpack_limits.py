"""Limits on MessagePack documents: what exceeds them is refused before it takes memory."""

import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import codec
from protocol.codec import SMALL_BYTES, decode_payload, encode_payload
from protocol.errors import ProtocolError
from protocol.messages import Ack, AnyMessage, TensorEntry, WeightManifest, WeightPart, WeightPiece
from protocol.msgpack_limits import MANIFEST_ITEMS, MAX_ITEMS, check_shape
from tests.changes import slow_unless_changed
from tests.protocol.samples import SAMPLES

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=3), inner, max_size=20),
    max_leaves=30,
)
HOSTILE = {
    "array without end": b"\xdd\xff\xff\xff\xff",
    "map without end": b"\xdf\xff\xff\xff\xff",
    "text without end": b"\xdb\xff\xff\xff\xff",
    "arrays that share their bytes": b"\xdc\x01\x00" * 256 + b"\xc0" * 256,
    "deep arrays": b"\x91" * 100_000 + b"\xc0",
    "deep maps": b"\x81\xa0" * 100_000 + b"\xc0",
    "no such byte": b"\xc1",
    "nothing": b"",
    "two": b"\xc0\xc0",
}


@given(VALUES, st.data())
def test_whole_documents_pass_and_cut_ones_do_not(value: object, data: st.DataObject) -> None:
    packed = msgspec.msgpack.encode(value)
    check_shape(packed)
    check_shape(memoryview(bytearray(packed)))
    with pytest.raises(ProtocolError):
        check_shape(packed[: data.draw(st.integers(0, len(packed) - 1))])


@pytest.mark.parametrize("document", HOSTILE.values(), ids=HOSTILE)
def test_hostile_documents_are_refused(document: bytes) -> None:
    with pytest.raises(ProtocolError):
        check_shape(document)


def test_limits_are_exact() -> None:
    check_shape(msgspec.msgpack.encode([[1, 2], 3]), max_items=5, max_depth=2)
    with pytest.raises(ProtocolError, match="declares 5 values; at most 4"):
        check_shape(msgspec.msgpack.encode([[1, 2], 3]), max_items=4)
    with pytest.raises(ProtocolError, match="deeper than 1 levels"):
        check_shape(msgspec.msgpack.encode([[1, 2], 3]), max_depth=1)


def crowd(words: int) -> bytes:
    """An acknowledgement of so many messages with names of their own: the worst that a byte can become."""
    refused = b"".join(b"\xa3" + bytes((i & 127, i >> 7 & 127, i >> 14)) + b"\xa0" for i in range(words))
    return b"\x83\xa4kind\xa3ack\xa8messages\x90\xa7refused\xdf" + words.to_bytes(4, "big") + refused


def spent(payload: bytes) -> tuple[int, AnyMessage | ProtocolError]:
    """Bytes that decoding took at its peak, and what came of it."""
    tracemalloc.start()
    try:
        try:
            found: AnyMessage | ProtocolError = decode_payload(payload)
        except ProtocolError as error:
            found = error
        return tracemalloc.get_traced_memory()[1], found
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "head",
    [b"\x82\xa4kind\xa3ack\xa8messages", b"\x82\xa4kind\xa5hello\xa1x", b"\x82\xa4kind\xa3ack\xa7refused"],
)
@pytest.mark.parametrize("document", HOSTILE.values(), ids=HOSTILE)
def test_hostile_payloads_cost_a_few_times_their_size(head: bytes, document: bytes) -> None:
    peak, found = spent(head + document)
    assert isinstance(found, ProtocolError)
    assert peak < 10 * len(document) + (64 << 10)


def test_a_small_payload_decodes_to_a_bounded_size() -> None:
    payload = crowd((SMALL_BYTES - 100) // 5)
    assert len(payload) <= SMALL_BYTES
    peak, found = spent(payload)
    assert isinstance(found, Ack)
    assert peak < 48 << 20


def test_a_large_payload_of_many_values_is_refused_before_decoding() -> None:
    peak, found = spent(crowd(MAX_ITEMS // 2 + 1))
    assert isinstance(found, ProtocolError)
    assert peak < 1 << 20


def test_a_large_payload_of_few_values_passes() -> None:
    message = msgspec.structs.replace(SAMPLES["score_failure"], error="x" * (2 * SMALL_BYTES))
    assert decode_payload(encode_payload(message)) == message


def test_a_manifest_of_many_tensors_in_pieces_on_several_ranks_passes() -> None:
    tensors, ranks = 36_000, 4
    entries = [
        TensorEntry(f"model.layers.{i}.weight", "bfloat16", (4096, 4096), 0, i << 25, 1 << 25, i)
        for i in range(tensors)
    ]
    parts = [
        WeightPart(
            f"host:{rank}/gloo",
            tuple(WeightPiece(i, ((rank << 10, rank + 1 << 10), (0, 4096))) for i in range(tensors)),
        )
        for rank in range(ranks)
    ]
    manifest = WeightManifest(
        epoch="e",
        version=1,
        transport="nccl",
        location="",
        buckets=(1 << 60,),
        tensors=tuple(entries),
        parts=tuple(parts),
    )
    payload = encode_payload(manifest)
    with pytest.raises(ProtocolError, match=f"at most {MAX_ITEMS}"):
        check_shape(payload)
    assert decode_payload(payload) == manifest


def links(count: int) -> bytes:
    """A manifest of a chain of so many links: the most memory that one of its values can become."""
    manifest = {
        "kind": "weight_manifest",
        "epoch": "",
        "version": 1,
        "transport": "",
        "location": "",
        "buckets": [],
        "tensors": [],
        "chain": [[f"{i:06}", (1 << 60) + i, (1 << 40) + i] for i in range(count)],
    }
    return msgspec.msgpack.encode(manifest)


def test_a_manifest_decodes_to_a_bounded_size() -> None:
    """By a small one: each of its values takes the same."""
    count = 1 << 17
    peak, found = spent(links(count))
    assert isinstance(found, WeightManifest)
    assert peak / (4 * count) * MANIFEST_ITEMS < 256 << 20


@slow_unless_changed("protocol/")
def test_a_manifest_of_more_values_is_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(decode_payload(links(MANIFEST_ITEMS // 4 - 100)), WeightManifest)
    with pytest.raises(ProtocolError, match=f"at most {MANIFEST_ITEMS}"):
        decode_payload(links(MANIFEST_ITEMS // 4 + 1))
    monkeypatch.setattr(codec, "MANIFEST_ITEMS", 4 << 17)
    peak, refused = spent(links((1 << 17) + 1))
    assert isinstance(refused, ProtocolError)
    assert peak < 1 << 20

"""Frames: golden files, an independent reader, and noise that raises our own errors and nothing else."""

import math
import typing
from concurrent.futures import ThreadPoolExecutor

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import codec
from protocol.codec import SCHEMA, decode, decode_envelope, encode, open_payload
from protocol.errors import FrameTooLarge, ProtocolError
from protocol.messages import AnyMessage, Hello, ScoredRollout, WeightApplied
from protocol.tensors import Array
from tests.protocol.samples import GOLDEN, ROLLOUT, SAMPLES, frame_of


def test_every_message_has_a_sample() -> None:
    tags = {kind.__struct_config__.tag for kind in typing.get_args(AnyMessage)}
    assert tags == set(SAMPLES)


@pytest.mark.parametrize("kind", SAMPLES)
def test_golden_frame_is_what_is_written(kind: str) -> None:
    assert (GOLDEN / f"{kind}.v{SCHEMA}.msgpack").read_bytes() == frame_of(kind)


@pytest.mark.parametrize("kind", SAMPLES)
def test_golden_frame_is_read_back(kind: str) -> None:
    envelope, message = decode((GOLDEN / f"{kind}.v{SCHEMA}.msgpack").read_bytes())
    assert message == SAMPLES[kind]
    assert (envelope.run, envelope.id, envelope.epoch, envelope.group) == ("demo", "m1", "e1", 7)


@pytest.mark.parametrize("kind", SAMPLES)
def test_plain_msgpack_reads_the_frame(kind: str) -> None:
    frame = msgpack.unpackb((GOLDEN / f"{kind}.v{SCHEMA}.msgpack").read_bytes(), strict_map_key=False)
    assert frame["schema"] == SCHEMA
    assert frame["payload"]["kind"] == kind
    fields = {field.encode_name for field in msgspec.structs.fields(type(SAMPLES[kind]))}
    assert set(frame["payload"]) - {"kind"} == fields


def test_threads_that_encode_at_once_get_the_frames_of_their_own_messages() -> None:
    kinds = sorted(SAMPLES)
    with ThreadPoolExecutor(4) as pool:
        frames = list(pool.map(frame_of, kinds * 50))
    assert frames == [frame_of(kind) for kind in kinds] * 50


def test_buffer_for_payloads_is_given_up_after_a_large_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "SCRATCH_BYTES", 100)
    frames = [encode(Hello(sender="s" * size, role="r"), run="demo", id="m") for size in (10, 200, 10)]
    assert len(codec._thread.scratch) <= 100
    assert [len(decode(frame)[1].sender) for frame in frames] == [10, 200, 10]  # type: ignore[union-attr]


def test_older_payload_without_new_fields_is_read() -> None:
    payload = msgpack.packb({"kind": "heartbeat", "receiver": "r", "sequence": 1})
    assert codec.decode_payload(payload).credit == -1  # type: ignore[union-attr]


def test_newer_payload_with_unknown_fields_is_read() -> None:
    payload = msgpack.packb({"kind": "hello", "sender": "s", "role": "rollout", "tomorrow": 1})
    assert codec.decode_payload(payload) == Hello(sender="s", role="rollout")


@given(st.binary(max_size=200))
def test_noise_raises_protocol_errors_only(noise: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(noise)


@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_a_flipped_bit_is_refused_or_harmless(kind: str, data: st.DataObject) -> None:
    frame = bytearray(frame_of(kind))
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        envelope, message = decode(bytes(frame))
    except ProtocolError:
        return
    assert message == SAMPLES[kind]
    assert envelope == decode_envelope(frame_of(kind))


@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_a_truncated_frame_is_refused(kind: str, data: st.DataObject) -> None:
    frame = frame_of(kind)
    with pytest.raises(ProtocolError):
        decode(frame[: data.draw(st.integers(0, len(frame) - 1))])


def test_checksum_mismatch_is_named() -> None:
    frame = frame_of("hello").replace(b"rollout.0.1", b"rollout.0.2")
    with pytest.raises(ProtocolError, match=r"message m1: .* do not match their checksum"):
        decode_envelope(frame)


@pytest.mark.parametrize("name", ["evil\n12:00:00 forged", "\x1b[31m", "x" * 129, "a b", "id\n", "é"])
@pytest.mark.parametrize("part", ["id", "run", "epoch", "token"])
def test_a_name_that_a_log_line_could_not_have_is_refused(part: str, name: str) -> None:
    frame = encode(SAMPLES["hello"], **({"run": "demo", "id": "m1"} | {part: name}))
    with pytest.raises(ProtocolError, match=part):
        decode_envelope(frame)


@pytest.mark.parametrize("pause_ms", [1e308, float("inf"), float("-inf"), float("nan"), -1.0])
def test_a_pause_that_no_clock_measures_is_refused(pause_ms: float) -> None:
    sent = WeightApplied(engine="rollout.0.a", epoch="e1", version=1, pause_ms=pause_ms)
    with pytest.raises(ProtocolError, match="pause_ms"):
        decode(encode(sent, run="demo", id="m1"))


@pytest.mark.parametrize(
    "changes", [{"generate_s": math.inf}, {"read_tokens": -1}, {"cached_tokens": 2**64 - 1}]
)
def test_a_group_with_a_measurement_that_nothing_measures_is_refused(changes: dict[str, float]) -> None:
    sent = msgspec.structs.replace(ROLLOUT, **changes)
    with pytest.raises(ProtocolError, match=next(iter(changes))):
        decode(encode(sent, run="demo", id="m1"))
    scored = ScoredRollout(rollout=ROLLOUT, rewards=Array.of([0.0], "float32"), score_s=math.nan)
    with pytest.raises(ProtocolError, match="score_s"):
        decode(encode(scored, run="demo", id="m1"))


def test_other_schema_is_refused() -> None:
    frame = msgpack.unpackb(frame_of("hello"))
    frame["schema"] = SCHEMA + 1
    with pytest.raises(ProtocolError, match=f"schema {SCHEMA + 1}"):
        decode_envelope(msgpack.packb(frame))


def test_oversized_frame_is_refused_before_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 8192)
    with pytest.raises(FrameTooLarge):
        decode(b"\x00" * 8193)
    with pytest.raises(FrameTooLarge):
        encode(Hello(sender="x" * 8192, role="r"), run="r", id="1")


def test_payload_stays_packed_until_opened() -> None:
    envelope = decode_envelope(frame_of("rollout"))
    assert isinstance(envelope.payload, msgspec.Raw)
    assert open_payload(envelope) == SAMPLES["rollout"]

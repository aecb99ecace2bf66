"""Encodes and decodes frames: one MessagePack frame per message, an envelope around a checksummed payload.

    frame = msgpack map {schema, run, epoch, id, group, token, sum, payload}

`sum` is the xxh3-64 of the payload's bytes, seeded with the xxh3-64 of [run, epoch, id, group, token] as
MessagePack. `payload` is the message itself, embedded rather than wrapped in a byte string, so that any
MessagePack reader can read it.
"""

import threading
from typing import Annotated

import msgspec
import xxhash

from protocol.errors import FrameTooLarge, ProtocolError
from protocol.messages import AnyMessage
from protocol.msgpack_limits import MANIFEST_ITEMS, MOST_ITEMS, check_shape

SCHEMA = 2
MAX_FRAME_BYTES = 256 << 20
"""Limit on a frame, bytes."""
SMALL_BYTES = 1 << 20
"""Payloads of at most this many bytes are decoded without counting their values first; they decode to about
40 MiB at worst."""

SCRATCH_BYTES = 8 << 20
"""Largest buffer that a thread keeps between two messages that it encodes."""

Name = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z._-]{0,128}\Z")]
"""A random id, a run or a token: short and without control characters, so that every log line may have it."""
Buffer = bytes | bytearray | memoryview


class Envelope(msgspec.Struct, frozen=True, kw_only=True, rename={"checksum": "sum"}):
    """Routing data of a message, which the bus reads without decoding the payload."""

    schema: int = SCHEMA
    run: Name
    epoch: Name = ""
    """Epoch known to the sender; empty before it knows one."""
    id: Name
    """Message id: unique per message, the same when the message is resent. Empty: not needed."""
    group: int = -1
    """Group that the message is about, or -1."""
    token: Name = ""
    """Lease token, if the message belongs to a lease."""
    checksum: int
    payload: msgspec.Raw


class _Thread(threading.local):
    """Holds each thread's buffer for payloads: warm memory that is as large as its last message."""

    def __init__(self) -> None:
        self.scratch = bytearray()


_thread = _Thread()
_encoder = msgspec.msgpack.Encoder()
_MANIFEST = b"\xa4kind\xafweight_manifest"
"""First bytes of a manifest behind the byte for its map, as `_encoder` writes it."""
_payload_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)


def encode_payload(message: AnyMessage) -> bytes:
    """Return a message as MessagePack, without an envelope."""
    return _encoder.encode(message)


def decode_payload(data: Buffer) -> AnyMessage:
    """Return the message that `encode_payload` encoded.

    Raises:
        ProtocolError: `data` is not one of the messages of `AnyMessage`, or exceeds the limits of
            `protocol.msgpack_limits`.
    """
    if len(data) > SMALL_BYTES:
        is_manifest = bytes(data[1 : 1 + len(_MANIFEST)]) == _MANIFEST
        check_shape(data, most_items=MANIFEST_ITEMS if is_manifest else MOST_ITEMS)
    try:
        return _payload_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message: {error}") from error


def encode(
    message: AnyMessage, *, run: str, id: str, epoch: str = "", group: int = -1, token: str = ""
) -> bytes:
    """Return the frame of `message`.

    Raises:
        FrameTooLarge: the frame would exceed `MAX_FRAME_BYTES`.
    """
    scratch = _thread.scratch
    _encoder.encode_into(message, scratch)
    if len(scratch) > SCRATCH_BYTES:
        _thread.scratch = bytearray()
    return wrap(scratch, run=run, id=id, epoch=epoch, group=group, token=token)


def wrap(payload: Buffer, *, run: str, id: str, epoch: str = "", group: int = -1, token: str = "") -> bytes:
    """Return the frame of a message that is encoded already.

    Raises:
        FrameTooLarge: the frame would exceed `MAX_FRAME_BYTES`.
    """
    if len(payload) > MAX_FRAME_BYTES - 4096:
        raise FrameTooLarge(f"message {id} of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}")
    envelope = Envelope(
        run=run,
        epoch=epoch,
        id=id,
        group=group,
        token=token,
        checksum=_checksum(payload, run, epoch, id, group, token),
        payload=msgspec.Raw(b""),  # the payload is the last value, so it can be appended
    )
    return b"".join((_encoder.encode(envelope), payload))


def decode_envelope(frame: Buffer) -> Envelope:
    """Decode and check the envelope of a frame; the payload stays encoded.

    Raises:
        ProtocolError: no bytes raise another exception.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
    try:
        envelope = _envelope_decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a frame: {error}") from error
    if envelope.schema != SCHEMA:
        raise ProtocolError(f"schema {envelope.schema}; this build reads {SCHEMA}")
    payload = memoryview(envelope.payload)
    if (
        _checksum(payload, envelope.run, envelope.epoch, envelope.id, envelope.group, envelope.token)
        != envelope.checksum
    ):
        raise ProtocolError(f"message {envelope.id}: envelope and payload do not match their checksum")
    return envelope


def open_payload(envelope: Envelope) -> AnyMessage:
    """Decode the message in an envelope.

    Raises:
        ProtocolError: the payload is not one of the messages of `AnyMessage`.
    """
    return decode_payload(memoryview(envelope.payload))


def decode(frame: Buffer) -> tuple[Envelope, AnyMessage]:
    """Return envelope and message of a frame; raises what `decode_envelope` and `open_payload` raise."""
    envelope = decode_envelope(frame)
    return envelope, open_payload(envelope)


def _checksum(payload: Buffer, *names: str | int) -> int:
    return xxhash.xxh3_64_intdigest(payload, seed=xxhash.xxh3_64_intdigest(_encoder.encode(names)))

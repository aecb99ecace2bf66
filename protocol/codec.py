"""Encodes and decodes frames. A frame is one MessagePack map: an envelope with a checksummed payload.

    frame = msgpack map {schema, run, epoch, id, group, token, sum, payload}

`sum` is the xxh3-64 of the payload's bytes. Its seed is the xxh3-64 of [run, epoch, id, group, token] in
MessagePack. `payload` is the message as a nested map, not a byte string, so any MessagePack reader can read
the message.
"""

import threading
from typing import Annotated

import msgspec
import xxhash

from protocol.errors import FrameTooLarge, ProtocolError
from protocol.messages import AnyMessage
from protocol.msgpack_limits import MANIFEST_ITEMS, MAX_ITEMS, check_shape

SCHEMA = 2
MAX_FRAME_BYTES = 256 << 20
"""Maximum size of a frame, bytes."""
SMALL_BYTES = 1 << 20
"""Payloads up to this size, bytes, are decoded without counting their values first. They decode to at most
about 40 MiB."""

SCRATCH_BYTES = 8 << 20
"""Largest encoding buffer that a thread keeps between two messages, bytes."""

Name = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z._-]{0,128}\Z")]
"""Identifier of a message, run or token: short and without control characters, so it is safe in log lines."""
Buffer = bytes | bytearray | memoryview


class Envelope(msgspec.Struct, frozen=True, kw_only=True, rename={"checksum": "sum"}):
    """Routing data of a message, which the bus reads without decoding the payload."""

    schema: int = SCHEMA
    run: Name
    epoch: Name = ""
    """Epoch known to the sender; empty if unknown."""
    id: Name
    """Message id, unique per message; a resent message keeps its id. Empty: the message needs no id."""
    group: int = -1
    """Group that the message is about, or -1."""
    token: Name = ""
    """Lease token, if the message belongs to a lease."""
    checksum: int
    payload: msgspec.Raw


class _Thread(threading.local):
    """Thread-local buffer for payloads: warm memory, as large as the thread's last message."""

    def __init__(self) -> None:
        self.scratch = bytearray()


_thread = _Thread()
_encoder = msgspec.msgpack.Encoder()
_MANIFEST = b"\xa4kind\xafweight_manifest"
"""First bytes that `_encoder` writes for a manifest, after the byte that opens its map."""
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
        check_shape(data, max_items=MANIFEST_ITEMS if is_manifest else MAX_ITEMS)
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
    """Return the frame of a message that is already encoded.

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
        FrameTooLarge, ProtocolError: no input raises any other exception.
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
    """Return the envelope and message of a frame. Raises ProtocolError."""
    envelope = decode_envelope(frame)
    return envelope, open_payload(envelope)


def _checksum(payload: Buffer, *names: str | int) -> int:
    return xxhash.xxh3_64_intdigest(payload, seed=xxhash.xxh3_64_intdigest(_encoder.encode(names)))

"""Frames: one MessagePack frame a message, an envelope around a payload with a checksum.

    frame = msgpack map {schema, run, epoch, id, group, token, sum, payload}

`sum` is the xxh3-64 of the payload's bytes, seeded with that of [run, epoch, id, group, token] as
MessagePack; `payload` is the message itself, embedded, so that any MessagePack reader sees it.
"""

import msgspec
import xxhash

from protocol.errors import ChecksumMismatch, FrameTooLarge, ProtocolError, UnsupportedSchema
from protocol.messages import AnyMessage
from protocol.msgpack_limits import check_shape

SCHEMA = 2
MAX_FRAME_BYTES = 256 << 20
SMALL_BYTES = 1 << 20
"""A payload up to here unfolds to some 40 MiB at worst, whatever it holds; only in larger ones are values
counted first."""

Buffer = bytes | bytearray | memoryview


class Envelope(msgspec.Struct, frozen=True, kw_only=True, rename={"checksum": "sum"}):
    """What the bus needs to know of a message without opening it."""

    schema: int = SCHEMA
    run: str
    epoch: str = ""
    """Epoch that the sender believes in; empty before it knows one."""
    id: str
    """Message id: unique for each message, equal when the message is sent again."""
    group: int = -1
    """Group that the message is about, or -1."""
    token: str = ""
    """Lease token, where the message belongs to a lease."""
    checksum: int
    payload: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_payload_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)


def encode_payload(message: AnyMessage) -> bytes:
    """A message alone, as MessagePack."""
    return _encoder.encode(message)


def decode_payload(data: Buffer) -> AnyMessage:
    """The inverse of `encode_payload`.

    Raises:
        ProtocolError: if `data` is not one of our messages, or unfolds to more than
            `protocol.msgpack_limits` allows.
    """
    if len(data) > SMALL_BYTES:
        check_shape(data)
    try:
        return _payload_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message: {error}") from error


def encode(
    message: AnyMessage, *, run: str, id: str, epoch: str = "", group: int = -1, token: str = ""
) -> bytes:
    """One frame for `message`.

    Raises:
        FrameTooLarge: if the frame would exceed `MAX_FRAME_BYTES`.
    """
    return wrap(_encoder.encode(message), run=run, id=id, epoch=epoch, group=group, token=token)


def wrap(payload: bytes, *, run: str, id: str, epoch: str = "", group: int = -1, token: str = "") -> bytes:
    """One frame for a message that `encode_payload` has packed.

    Raises:
        FrameTooLarge: if the frame would exceed `MAX_FRAME_BYTES`.
    """
    if len(payload) > MAX_FRAME_BYTES - 4096:
        raise FrameTooLarge(f"message {id} of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _encoder.encode(
        Envelope(
            run=run,
            epoch=epoch,
            id=id,
            group=group,
            token=token,
            checksum=_checksum(payload, run, epoch, id, group, token),
            payload=msgspec.Raw(payload),
        )
    )


def decode_envelope(frame: Buffer) -> Envelope:
    """Read and check the envelope of a frame; the payload stays packed.

    Raises:
        FrameTooLarge, UnsupportedSchema, ChecksumMismatch, ProtocolError: and nothing else, whatever the
        bytes are.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
    try:
        envelope = _envelope_decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a frame: {error}") from error
    if envelope.schema != SCHEMA:
        raise UnsupportedSchema(f"schema {envelope.schema}; this build reads {SCHEMA}")
    payload = memoryview(envelope.payload)
    if (
        _checksum(payload, envelope.run, envelope.epoch, envelope.id, envelope.group, envelope.token)
        != envelope.checksum
    ):
        raise ChecksumMismatch(f"message {envelope.id}: envelope and payload do not match their checksum")
    return envelope


def open_payload(envelope: Envelope) -> AnyMessage:
    """The message in an envelope.

    Raises:
        ProtocolError: if the payload is not one of our messages.
    """
    return decode_payload(memoryview(envelope.payload))


def decode(frame: Buffer) -> tuple[Envelope, AnyMessage]:
    """Envelope and message of a frame; raises what `decode_envelope` and `open_payload` raise."""
    envelope = decode_envelope(frame)
    return envelope, open_payload(envelope)


def _checksum(payload: Buffer, *names: str | int) -> int:
    return xxhash.xxh3_64_intdigest(payload, seed=xxhash.xxh3_64_intdigest(_encoder.encode(names)))

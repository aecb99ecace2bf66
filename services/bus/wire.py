"""A frame around a payload that is encoded already."""

import msgspec
import xxhash

from protocol.codec import MAX_FRAME_BYTES, Envelope
from protocol.errors import FrameTooLarge

_encoder = msgspec.msgpack.Encoder()


def wrap(payload: bytes, *, run: str, id: str, epoch: str, group: int, token: str) -> bytes:
    """The frame that `protocol.codec.encode` makes, of a message that `encode_payload` has packed.

    Raises:
        FrameTooLarge: if the frame would exceed `MAX_FRAME_BYTES`.
    """
    if len(payload) > MAX_FRAME_BYTES - 4096:
        raise FrameTooLarge(f"payload of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _encoder.encode(
        Envelope(
            run=run,
            epoch=epoch,
            id=id,
            group=group,
            token=token,
            checksum=xxhash.xxh3_64_intdigest(payload),
            payload=msgspec.Raw(payload),
        )
    )

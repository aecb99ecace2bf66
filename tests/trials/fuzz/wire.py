"""Fuzzes decoders of what arrives over the bus."""

import asyncio
import functools
import math
from pathlib import Path

import msgspec

from protocol.codec import decode, decode_payload, encode, encode_payload
from protocol.errors import ProtocolError, WeightError
from protocol.messages import Rollout, ScoredRollout, TensorEntry, WeightManifest
from protocol.msgpack_limits import check_shape
from protocol.tensors import Array
from protocol.weights.buckets import check_digest, check_layout, manifest_digest
from reward.config import RewardConfig
from reward.score import score_rollout
from reward.workers.pool import ScorePool
from tests.protocol.samples import GOLDEN, ROLLOUT, SAMPLES
from tests.trials.fuzz.target import Form, Target
from trainer.data.samples import check_scored

PAYLOADS = [encode_payload(message) for message in SAMPLES.values()]
VERSION = 10


def frame(data: bytes, _: Path) -> None:
    """A frame is refused, or gives an envelope and a message that make an equal frame."""
    try:
        envelope, message = decode(data)
    except ProtocolError:
        return
    again = encode(
        message,
        run=envelope.run,
        id=envelope.id,
        epoch=envelope.epoch,
        group=envelope.group,
        token=envelope.token,
    )
    assert encode_payload(decode(again)[1]) == encode_payload(message)


def message(data: bytes, _: Path) -> None:
    """A message is refused, or encodes to itself; as `frame`, without an envelope and so without checksum."""
    try:
        found = decode_payload(data)
    except ProtocolError:
        return
    packed = encode_payload(found)
    assert encode_payload(decode_payload(packed)) == packed


def scored(data: bytes, _: Path) -> None:
    """A group that the ingest admits has finite numbers and arrays that fit together."""
    try:
        found = decode_payload(data)
        if isinstance(found, Rollout):
            found = ScoredRollout(rollout=found, rewards=found.environment_rewards or Array.of([], "float32"))
        if not isinstance(found, ScoredRollout):
            return
        counts = check_scored(found, VERSION)
    except ProtocolError:
        return
    assert all(0 <= version <= VERSION and n > 0 for version, n in counts.items())
    assert sum(counts.values()) == int(found.rollout.loss_mask.numpy().sum())


def rollout(data: bytes, _: Path) -> None:
    """A reward worker makes a score or a failure of every rollout."""
    try:
        found = decode_payload(data)
    except ProtocolError:
        return
    if isinstance(found, Rollout):
        result = _loop().run(score_rollout(found, ScorePool(RewardConfig(verifiers=())), "x"))
        encode_payload(result)
        if isinstance(result, ScoredRollout):
            assert len(result.rewards.numpy()) == len(found.responses)


@functools.cache
def _loop() -> asyncio.Runner:
    return asyncio.Runner()


def array(data: bytes, _: Path) -> None:
    """An array has as many bytes as its shape says."""
    try:
        found = msgspec.msgpack.decode(data, type=Array)
        values = found.numpy()
    except (ProtocolError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    assert values.nbytes == len(found.data)
    assert values.shape == found.shape


def manifest(data: bytes, _: Path) -> None:
    """A manifest that passes has tensors which lie in their buckets and do not overlap.

    Its digest is made to fit.
    """
    try:
        found = decode_payload(data)
    except ProtocolError:
        return
    if not isinstance(found, WeightManifest):
        return
    try:
        check_layout(found)
        check_digest(msgspec.structs.replace(found, digest=manifest_digest(found.tensors)))
    except WeightError:
        return
    taken: list[tuple[int, int, int]] = []
    for entry in found.tensors:
        assert all(n >= 0 for n in entry.shape)
        assert 0 <= entry.offset <= entry.offset + entry.nbytes <= found.buckets[entry.bucket]
        assert not any(
            b == entry.bucket and start < entry.offset + entry.nbytes and entry.offset < end
            for b, start, end in taken
        )
        taken.append((entry.bucket, entry.offset, entry.offset + entry.nbytes))


def shape(data: bytes, _: Path) -> None:
    """What passes the check of counts and depth is readable by MessagePack's own reader, and not too deep."""
    try:
        check_shape(data, max_items=1000, max_depth=20)
    except ProtocolError:
        return
    try:
        value = msgspec.msgpack.decode(data, ext_hook=lambda code, body: None)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, TypeError):
        return  # keys that cannot be, text that is not UTF-8, timestamps out of range
    assert _depth(value) <= 20


def _depth(value: object) -> int:
    children = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return 1 + max(map(_depth, children), default=0) if isinstance(value, (dict, list)) else 0


FRAMES = [path.read_bytes() for path in sorted(GOLDEN.glob("*.msgpack"))]
MANIFEST = SAMPLES["weight_manifest"]
MANIFESTS = [
    encode_payload(
        msgspec.structs.replace(
            MANIFEST, tensors=(TensorEntry("a", "float32", dims, 0, 0, 4 * math.prod(dims), 1),)
        )
    )
    for dims in ((2, 3), (-2, -3), (-2, 3), (0, -1))
]
ROLLOUTS = [
    encode_payload(msgspec.structs.replace(ROLLOUT, **change))
    for change in (
        {},
        {"group": (1 << 64) - 1},
        {"environment_rewards": Array.of([[0.0], [1.0]], "float32")},
        {"environment_rewards": Array.of(0.0, "float32")},
        {"lengths": Array.of([2**31 - 1, 2**31 - 1], "int32")},
    )
]
SCORED = [encode_payload(SAMPLES["scored"]), *ROLLOUTS]
TARGETS = {
    "frame": Target(frame, FRAMES, Form.FRAME),
    "message": Target(message, PAYLOADS, Form.MSGPACK),
    "scored": Target(scored, SCORED, Form.MSGPACK),
    "rollout": Target(rollout, ROLLOUTS, Form.MSGPACK),
    "array": Target(
        array,
        [msgspec.msgpack.encode(Array.of([[1, 2], [3, 4]], kind)) for kind in ("int32", "float32", "bool")],
        Form.MSGPACK,
    ),
    "manifest": Target(manifest, MANIFESTS, Form.MSGPACK),
    "shape": Target(shape, [*FRAMES, *PAYLOADS], Form.MSGPACK),
}

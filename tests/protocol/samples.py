"""A sample of every message, with every field set.

Run this file to write the golden frames of a new message or schema version.
"""

from pathlib import Path
from typing import Any

import msgspec

from protocol.codec import SCHEMA, encode
from protocol.messages import (
    Ack,
    Action,
    AnyMessage,
    Call,
    Control,
    Heartbeat,
    Hello,
    Recall,
    Recalled,
    Remark,
    Rollout,
    ScoredRollout,
    ScoreFailure,
    StepReport,
    TensorEntry,
    WeightApplied,
    WeightDraft,
    WeightFailed,
    WeightLink,
    WeightManifest,
    WeightPart,
    WeightPiece,
    WeightStaged,
)
from protocol.tensors import Array

GOLDEN = Path(__file__).parent / "golden"

ROLLOUT = Rollout(
    group=7,
    token="0123456789abcdef",
    engine="rollout.0.aabbccdd",
    prompt_tokens=Array.of([5, 6, 7], "int32"),
    lengths=Array.of([2, 1], "int32"),
    tokens=Array.of([8, 9, 10], "int32"),
    logprobs=Array.of([-0.5, -1.25, -2.0], "float32"),
    loss_mask=Array.of([1, 1, 1], "uint8"),
    spans=Array.of([[0, 1, 3], [0, 2, 4], [1, 1, 4]], "int32"),
    finish_reasons=("stop", "length"),
    responses=("ab", "c"),
    prompt_text="372=",
    metadata=msgspec.Raw(msgspec.msgpack.encode({"answer": "7"})),
    generate_s=0.125,
    environment_rewards=Array.of([0.0, 1.0], "float32"),
    prompt_experts=Array.of([[[0, 3]], [[1, 2]], [[3, 0]]], "uint16"),
    experts=Array.of([[[2, 1]], [[65535, 65535]], [[65535, 65535]]], "uint16"),
    branches=Array.of([[0, -1, 0], [1, -1, 0]], "int32"),
    calls=Array.of([[0, 0, 0, 0, 2], [1, 0, 1, 0, 1], [1, 1, -1, 0, 0]], "int32"),
    read_tokens=12,
    cached_tokens=3,
    row_texts=("ab", "c"),
    turns=Array.of([[0, 0, 0, 1], [0, 0, 1, 2], [1, 1, 0, 1]], "int32"),
    turn_texts=("a", "b", "c"),
    turn_contexts=("", "", ""),
    own_prompts=Array.of([0, 0], "int32"),
    cancelled=Array.of([3, 0], "int32"),
)
UNCOUNTED: dict[str, Any] = {
    "read_tokens": 0,
    "cached_tokens": 0,
    "row_texts": (),
    "turns": None,
    "turn_texts": (),
    "turn_contexts": (),
    "own_prompts": None,
    "cancelled": None,
}
"""Fields of `ROLLOUT` that earlier releases lack."""
WITHOUT_TURNS: dict[str, Any] = {"turns": None, "turn_texts": (), "turn_contexts": ()}
BRANCHED = msgspec.structs.replace(
    ROLLOUT,
    lengths=Array.of([2, 2, 1], "int32"),
    tokens=Array.of([8, 9, 11, 12, 10], "int32"),
    logprobs=Array.of([-0.5, -1.25, 0.0, -0.25, -2.0], "float32"),
    loss_mask=Array.of([1, 1, 0, 1, 1], "uint8"),
    spans=Array.of([[0, 1, 3], [0, 2, 4], [1, 2, 4], [2, 1, 4]], "int32"),
    calls=None,
    **WITHOUT_TURNS,
    experts=Array.of([[[2, 1]], [[65535, 65535]], [[1, 1]], [[65535, 65535]], [[65535, 65535]]], "uint16"),
    branches=Array.of([[0, -1, 0], [0, 0, 1], [1, -1, 0]], "int32"),
    row_texts=("ab", "?d", "c"),
)
"""Its first sample has two branches, which share the prompt and a token."""

CALL = Call(
    group=7,
    token="0123456789abcdef",
    epoch="e1",
    engine="rollout.0.aabbccdd",
    sample=0,
    attempt=0,
    number=1,
    parent=0,
    inserted=Array.of([5, 6], "int32"),
    tokens=Array.of([8, 9], "int32"),
    logprobs=Array.of([-0.5, -1.25], "float32"),
    spans=Array.of([[1, 3], [2, 4]], "int32"),
    finish_reason="stop",
    request="00112233445566778899aabbccddeeff",
    context="ffeeddccbbaa99887766554433221100",
    began_ms=1_000,
    ended_ms=1_500,
)
RESULT = msgspec.structs.replace(
    CALL,
    number=2,
    parent=-1,
    inserted=Array.of([], "int32"),
    tokens=Array.of([], "int32"),
    logprobs=Array.of([], "float32"),
    spans=Array.of([], "int32"),
    finish_reason="",
    request="",
    context="",
    name="python 1",
    result=b'["42", ""]',
)
"""What a tool answered."""

SAMPLES: dict[str, AnyMessage] = {
    "rollout": ROLLOUT,
    "scored": ScoredRollout(
        rollout=ROLLOUT,
        rewards=Array.of([0.0, 1.0], "float32"),
        components={"exact_match": Array.of([0.0, 1.0], "float32")},
        scorer="reward.0.1",
        score_s=0.5,
        remarks=(
            Remark(
                verifier="judge",
                sample=1,
                text="Score: 1",
                prompt_tokens=50,
                completion_tokens=3,
                cost=0.25,
                is_cached=True,
            ),
        ),
        turn_rewards=Array.of([0.5, -0.5, 1.0], "float32"),
        turn_components={"steps": Array.of([0.5, -0.5, 0.0], "float32")},
    ),
    "score_failure": ScoreFailure(
        group=7, token="0123456789abcdef", verifier="math", error="timeout", scorer="reward.0.1"
    ),
    "step_report": StepReport(
        step=3,
        version=4,
        epoch="e1",
        reward_mean=0.5,
        lag_histogram={0: 10, 1: 2},
        trained_tokens=12,
        skipped="",
        time=1.5,
        prefix_hit_rate=0.75,
        batch_digest="00112233445566778899aabbccddeeff",
        cancelled_samples=2,
        cancelled_tokens=3,
        cancelled_length_mean=1.5,
        reward_model_mean=-0.5,
        drafts_s=0.25,
        draft_loss=2.5,
    ),
    "weight_manifest": WeightManifest(
        epoch="e1",
        version=4,
        transport="shm",
        location="/dev/shm/x",
        buckets=(24,),
        tensors=(TensorEntry("a.weight", "float32", (2, 3), 0, 0, 24, 17),),
        digest=99,
        base_model="Qwen2ForCausalLM",
        parts=(
            WeightPart("127.0.0.1:7/gloo", (WeightPiece(0, ((0, 1), (0, 3))),)),
            WeightPart("127.0.0.1:8/gloo", (WeightPiece(0, ((1, 2), (0, 3))),)),
        ),
        chain=(WeightLink("v00000003-e1", 98, 24, apart=True), WeightLink("v00000004-e1", 99, 6)),
    ),
    "weight_draft": WeightDraft(epoch="e1", version=5, like=4),
    "weight_staged": WeightStaged(engine="x", epoch="e1", version=4, digest=99, stage_ms=1.5),
    "weight_applied": WeightApplied(engine="x", epoch="e1", version=4, pause_ms=2.5),
    "weight_failed": WeightFailed(engine="x", epoch="e1", version=4, error="short bucket", poisoned=True),
    "hello": Hello(sender="rollout.0.1", role="rollout", sent=3),
    "ack": Ack(messages=("m1", "m2"), refused={"m3": "not_held"}, credit=12, answers={"m5": b"\x80"}),
    "heartbeat": Heartbeat(receiver="reward.0.1", sequence=5, held=("m4",), seen=9, credit=12),
    "control": Control(action=Action.ABORT, groups=(1, 2)),
    "call": CALL,
    "recall": Recall(group=7, token="0123456789abcdef", epoch="e1", sample=0),
    "recalled": Recalled(calls=(CALL, RESULT), attempt=0, number=3),
}


def frame_of(kind: str) -> bytes:
    """The golden frame of a sample."""
    return encode(SAMPLES[kind], run="demo", id="m1", epoch="e1", group=7, token="0123456789abcdef")


if __name__ == "__main__":
    for kind in SAMPLES:
        path = GOLDEN / f"{kind}.v{SCHEMA}.msgpack"
        if not path.exists():
            path.write_bytes(frame_of(kind))

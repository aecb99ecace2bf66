"""Assembling samples into a message, which `protocol.rollout_view` decodes again."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from protocol.codec import decode_payload, encode_payload
from protocol.errors import EngineError, SettingsError
from protocol.messages import UNKNOWN_EXPERT, Rollout
from protocol.rollout_view import decode_rollout, sample_lengths
from protocol.tensors import Array
from rollout.prompts.base import Prompt
from rollout.sample import Branch, Sample
from rollout.trajectory import assemble, turn_texts

GOOD = Sample((5, 6, 7), (-0.5, 0.0, -1.25), (1, 0, 1), ((2, 3), (3, 4)), "stop")


def packed(*samples: Sample, prompt: Prompt | None = None) -> Rollout:
    return assemble(
        prompt or Prompt("q", metadata={"answer": "7"}, index=9),
        (1, 2),
        samples,
        [f"r{i}" for i in range(len(samples))],
        group=9,
        token="t",
        engine="e",
        generate_s=0.5,
    )


PROMPT = tuple(range(100, 181))
ANSWER = Sample((1, 2), (-0.5, -0.5), (1, 1), ((2, 3),), "environment", prompt=PROMPT)
AGENT = Branch((7, 8, 9), (0.0, 0.0, -0.5), (0, 0, 1), ((3, 3),), parent=0, shared=8)
"""A sub-agent's row: two tokens of a system message of its own, one that it sampled."""


@pytest.mark.parametrize(
    ("others", "common", "lengths"),
    [
        (ANSWER, 81, [2, 2]),
        (replace(ANSWER, prompt=(*PROMPT[:9], 5, *PROMPT[9:])), 9, [2, 2]),
        (replace(ANSWER, branches=(AGENT,)), 8, [2, 5]),
    ],
    ids=["the same prompt", "another prompt", "a sub-agent"],
)
def test_lengths_have_no_prompt_whatever_the_other_sample_did(
    others: Sample, common: int, lengths: list[int]
) -> None:
    rollout = packed(ANSWER, others)
    assert len(rollout.prompt_tokens.numpy()) == common
    assert sample_lengths(rollout) == lengths


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    count = draw(st.integers(1, 12))
    mask = (1, *draw(st.lists(st.integers(0, 1), min_size=count - 1, max_size=count - 1)))
    value = st.floats(-50, 0, width=32)
    ends = sorted({*draw(st.sets(st.integers(1, count), max_size=3)), count})
    return Sample(
        tokens=tuple(draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count))),
        logprobs=tuple(draw(value) if m else 0.0 for m in mask),
        loss_mask=mask,
        spans=tuple((end, draw(st.integers(0, 1000))) for end in ends),
        finish_reason=draw(st.sampled_from(["stop", "length", "environment"])),
    )


@given(st.lists(samples(), min_size=1, max_size=5), st.booleans())
def test_decode_rollout_is_the_inverse_of_assemble_over_the_wire(
    given_samples: list[Sample], rewarded: bool
) -> None:
    group = [replace(s, reward=float(i)) if rewarded else s for i, s in enumerate(given_samples)]
    received = decode_payload(encode_payload(packed(*group)))
    assert isinstance(received, Rollout)
    decoded = decode_rollout(received)
    assert (decoded.group, tuple(decoded.prompt)) == (9, (1, 2))
    for i, (sample, view) in enumerate(zip(group, decoded.rows, strict=True)):
        assert tuple(view.tokens) == sample.tokens
        assert tuple(view.logprobs) == sample.logprobs
        assert tuple(view.sampled) == sample.loss_mask
        starts = [0, *(end for end, _ in sample.spans)]
        assert list(view.versions) == [
            v for start, (end, v) in zip(starts, sample.spans, strict=False) for _ in range(end - start)
        ]
        assert (view.finish_reason, view.response, view.environment_reward) == (
            sample.finish_reason,
            f"r{i}",
            sample.reward,
        )


def test_the_message_carries_what_verifiers_need() -> None:
    rollout = packed(GOOD, replace(GOOD, finish_reason="length"))
    assert (rollout.group, rollout.token, rollout.engine, rollout.prompt_text, rollout.responses) == (
        9,
        "t",
        "e",
        "q",
        ("r0", "r1"),
    )
    assert msgspec.msgpack.decode(rollout.metadata) == {"answer": "7"}
    assert rollout.environment_rewards is None
    assert rollout.spans.numpy().tolist() == [[0, 2, 3], [0, 3, 4], [1, 2, 3], [1, 3, 4]]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tokens": (), "logprobs": (), "loss_mask": (), "spans": ()}, "no tokens"),
        ({"logprobs": (-0.5, 0.0)}, "3 tokens, but 2 logprobs"),
        ({"loss_mask": (1, 0, 1, 1)}, "4 in the mask"),
        ({"tokens": (5, -6, 7)}, "negative token"),
        ({"loss_mask": (1, 2, 1)}, "mask that is not 0 or 1"),
        ({"loss_mask": (0, 0, 0), "logprobs": (0.0, 0.0, 0.0)}, "no sampled token"),
        ({"logprobs": (-0.5, 0.0, float("nan"))}, "not a number of at most 0"),
        ({"logprobs": (-0.5, 0.0, float("-inf"))}, "not a number of at most 0"),
        ({"logprobs": (0.5, 0.0, -1.0)}, "not a number of at most 0"),
        ({"logprobs": (-0.5, -0.5, -1.0)}, "at an inserted token"),
        ({"spans": ((2, 3),)}, "do not rise to 3"),
        ({"spans": ((2, 3), (2, 4), (3, 4))}, "do not rise to 3"),
        ({"spans": ()}, "do not rise to 3"),
        ({"spans": ((3, -1),)}, "version below 0"),
        ({"finish_reason": "abort"}, "finish reason 'abort'"),
        ({"reward": float("inf")}, "reward inf"),
    ],
)
def test_a_sample_that_contradicts_itself_is_refused(change: dict[str, object], problem: str) -> None:
    with pytest.raises(EngineError, match=f"group 9 sample 1: .*{problem}"):
        packed(GOOD, replace(GOOD, **change))  # type: ignore[arg-type]


def test_rewards_are_given_to_all_samples_or_none() -> None:
    with pytest.raises(SettingsError, match="rewarded 1 of 2"):
        packed(GOOD, replace(GOOD, reward=1.0))


def test_metadata_that_does_not_fit_is_an_error_of_the_prompt() -> None:
    with pytest.raises(SettingsError, match="prompt 3: the metadata"):
        packed(GOOD, prompt=Prompt("q", metadata={"x": object()}, index=3))


def routed(*rows: list[int]) -> NDArray[np.uint16]:
    """One layer; a row for each token."""
    return np.array(rows, dtype=np.uint16)[:, None]


def test_prompt_data_of_one_sample_count_for_all() -> None:
    unknown = [UNKNOWN_EXPERT] * 2
    first = replace(GOOD, experts=routed([0, 1], unknown, [2, 3], [4, 5], unknown))
    second = replace(GOOD, experts=routed(unknown, [6, 7], [8, 9], [1, 0], unknown))
    view = decode_rollout(packed(first, second))
    assert view.prompt_experts is not None
    assert view.prompt_experts.tolist() == [[[0, 1]], [[6, 7]]]
    of_samples = [sample.experts for sample in view.rows]
    assert [experts is not None and experts.tolist() for experts in of_samples] == [
        [[[2, 3]], [[4, 5]], [unknown]],
        [[[8, 9]], [[1, 0]], [unknown]],
    ]


@pytest.mark.parametrize(
    ("experts", "problem"),
    [
        (routed([0, 1]), "sample 1: experts of another number of tokens"),
        (None, "recorded experts of 1 of 2 samples"),
        (np.zeros((5, 2, 2), dtype=np.uint16), "recorded experts of 2 of 2 samples, of different layers"),
    ],
)
def test_samples_that_differ_in_their_experts_are_refused(
    experts: NDArray[np.uint16] | None, problem: str
) -> None:
    with pytest.raises(EngineError, match=problem):
        packed(replace(GOOD, experts=routed(*[[0, 1]] * 5)), replace(GOOD, experts=experts))


def test_texts_follow_the_order_in_which_turns_were_made() -> None:
    rollout = Rollout(
        group=0, token="t", engine="e", prompt_tokens=Array.of([1], "int32"),
        lengths=Array.of([4, 2], "int32"), tokens=Array.of([2, 3, 4, 5, 6, 7], "int32"),
        logprobs=Array.of([0.0] * 6, "float32"), loss_mask=Array.of([1, 0, 0, 1, 0, 1], "uint8"),
        spans=Array.of([[0, 4, 0], [1, 2, 0]], "int32"), finish_reasons=("stop",), responses=("",),
        branches=Array.of([[0, -1, 0], [0, 0, 1]], "int32"),
        turns=Array.of([[0, 0, 0, 1], [0, 1, 1, 2], [0, 0, 3, 4]], "int32"),
    )  # fmt: skip
    found = turn_texts(rollout, lambda tokens: "".join(map(str, tokens)))
    assert (found.turn_texts, found.turn_contexts) == (("2", "7", "5"), ("", "6", "34"))

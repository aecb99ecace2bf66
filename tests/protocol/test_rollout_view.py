"""Decoding a rollout: its samples, and messages whose arrays contradict each other are refused by name."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import decode
from protocol.errors import ProtocolError
from protocol.messages import Rollout, ScoredRollout
from protocol.rollout_view import MAX_GROUPS, cancelled_lengths, decode_rollout, sample_lengths
from protocol.tensors import Array
from tests.protocol.samples import BRANCHED, GOLDEN, ROLLOUT, UNCOUNTED
from tests.trainer.groups import GroupSpec, SampleSpec, scored

PAIR = scored(
    GroupSpec(group=9, samples=[SampleSpec([5, 6, 7], [2, 2, 3], mask=[1, 0, 1]), SampleSpec([8, 9], [3, 4])])
).rollout


def test_samples_of_the_golden_rollout() -> None:
    view = decode_rollout(ROLLOUT)
    assert (view.group, view.prompt.tolist()) == (7, [5, 6, 7])
    first, second = view.rows
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([8, 9], [10])
    assert (first.logprobs.tolist(), second.logprobs.tolist()) == ([-0.5, -1.25], [-2.0])
    assert (first.sampled.tolist(), second.sampled.tolist()) == ([True, True], [True])
    assert (first.versions.tolist(), second.versions.tolist()) == ([3, 4], [4])
    assert (first.finish_reason, second.response, second.environment_reward) == ("stop", "c", 1.0)


def test_tokens_of_cancelled_samples_are_checked() -> None:
    assert cancelled_lengths(ROLLOUT) == [3, 0]
    assert cancelled_lengths(BRANCHED) == [3, 0]
    wrong = msgspec.structs.replace(ROLLOUT, cancelled=Array.of([3, -1], "int32"))
    with pytest.raises(ProtocolError, match="cancelled has a negative length"):
        cancelled_lengths(wrong)


def test_experts_are_of_the_samples_that_have_them() -> None:
    view = decode_rollout(ROLLOUT)
    assert view.prompt_experts is not None
    assert view.prompt_experts.tolist() == [[[0, 3]], [[1, 2]], [[3, 0]]]
    first, second = (sample.experts for sample in view.rows)
    assert first is not None
    assert second is not None
    assert (first.tolist(), second.tolist()) == ([[[2, 1]], [[65535, 65535]]], [[[65535, 65535]]])


def test_rollout_of_a_release_without_experts_is_read() -> None:
    for name in ("rollout", "scored"):
        _, message = decode((GOLDEN / f"{name}.v2.without_experts.msgpack").read_bytes())
        rollout = message.rollout if isinstance(message, ScoredRollout) else message
        assert isinstance(rollout, Rollout)
        view = decode_rollout(rollout)
        assert (view.prompt_experts, view.rows[0].experts) == (None, None)


def test_rollout_of_a_release_without_branches_is_read() -> None:
    for name in ("rollout", "scored"):
        _, message = decode((GOLDEN / f"{name}.v2.without_branches.msgpack").read_bytes())
        rollout = message.rollout if isinstance(message, ScoredRollout) else message
        assert isinstance(rollout, Rollout)
        assert rollout == msgspec.structs.replace(ROLLOUT, branches=None, calls=None, **UNCOUNTED)
        assert [row.sample for row in decode_rollout(rollout).rows] == [0, 1]
        assert sample_lengths(rollout) == [2, 1]


def test_a_branch_follows_tokens_of_its_sample() -> None:
    view = decode_rollout(BRANCHED)
    assert view.samples == 2
    assert [(row.sample, row.context.tolist(), row.tokens.tolist()) for row in view.rows] == [
        (0, [], [8, 9]),
        (0, [8], [11, 12]),
        (1, [], [10]),
    ]
    assert [row.environment_reward for row in view.rows] == [0.0, 0.0, 1.0]
    context = view.rows[1].context_experts
    assert context is not None
    assert context.tolist() == [[[2, 1]]]
    assert view.token_counts() == {3: 1, 4: 3}
    assert sample_lengths(BRANCHED) == [4, 1]


@pytest.mark.parametrize(
    ("branches", "problem"),
    [
        ([[0, -1, 0], [0, 1, 1], [1, -1, 0]], r"row 1 \(0, 1, 1\) follows no row"),
        ([[0, -1, 0], [0, 0, 3], [1, -1, 0]], "row 1 follows 3 of 2 tokens of row 0"),
        ([[0, -1, 0], [0, 0, -1], [1, -1, 0]], "row 1"),
        ([[0, -1, 0], [0, -1, 0], [1, -1, 0]], "row 1"),
        ([[0, -1, 0], [1, 0, 1], [1, 0, 1]], "row 1"),
        ([[0, -1, 0], [1, -1, 0], [0, 0, 1]], "row 2"),
        ([[0, -1, 0], [2, -1, 0], [2, 1, 0]], "row 1"),
        ([[0, -1, 0], [1, -1, 0]], "has shape"),
        ([[0, -1, 0], [1, -1, 0], [2, -1, 0]], "2 entries for 3 samples"),
    ],
)
def test_branches_that_contradict_the_rows_are_refused(branches: list[list[int]], problem: str) -> None:
    with pytest.raises(ProtocolError, match=f"group 7: .*{problem}"):
        decode_rollout(msgspec.structs.replace(BRANCHED, branches=Array.of(branches, "int32")))


def test_lengths_leave_out_what_is_a_samples_own_prompt() -> None:
    inserted = {"loss_mask": [0, 1, 0, 1, 1], "logprobs": [0.0, -1.25, 0.0, -0.25, -2.0]}
    arrays = {
        "loss_mask": Array.of(inserted["loss_mask"], "uint8"),
        "logprobs": Array.of(inserted["logprobs"], "float32"),
    }
    rollout = msgspec.structs.replace(BRANCHED, own_prompts=Array.of([1, 0], "int32"), **arrays)
    assert sample_lengths(rollout) == [3, 1]
    assert [row.own_prompt for row in decode_rollout(rollout).rows] == [1, 0, 0]


@pytest.mark.parametrize("own", [[1, 0], [-1, 0], [3, 0], [0, 1], [0], [0, 0, 0]])
def test_prompts_that_are_not_at_the_start_of_their_samples_are_refused(own: list[int]) -> None:
    rollout = msgspec.structs.replace(BRANCHED, own_prompts=Array.of(own, "int32"))
    for read in (sample_lengths, decode_rollout):
        with pytest.raises(ProtocolError, match="group 7: own_prompts"):
            read(rollout)


def test_without_a_prompt_the_first_token_must_not_be_sampled() -> None:
    bare = msgspec.structs.replace(
        BRANCHED, prompt_tokens=Array.of([], "int32"), prompt_experts=None, experts=None
    )
    with pytest.raises(ProtocolError, match="prompt_tokens is empty, and row 0 begins with a sampled token"):
        decode_rollout(bare)
    inserted = {
        "loss_mask": Array.of([0, 1, 0, 1, 0], "uint8"),
        "logprobs": Array.of([0.0, -1.25, 0.0, -0.25, 0.0], "float32"),
    }
    assert len(decode_rollout(msgspec.structs.replace(bare, **inserted)).prompt) == 0


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"experts": None}, "experts are set for only one of prompt and samples"),
        ({"experts": Array.of([[[1, 2]]], "uint16")}, "experts has shape"),
        ({"experts": Array.of([[[1]]] * 3, "uint16")}, "experts has shape"),
        ({"prompt_experts": Array.of([[[1]]] * 3, "int32")}, "prompt_experts is int32"),
        ({"prompt_experts": Array.of([[]] * 3, "uint16")}, "prompt_experts has shape"),
        ({"prompt_experts": Array.of([[[]]] * 3, "uint16")}, "prompt_experts have no layer"),
    ],
)
def test_experts_that_contradict_the_tokens_are_refused(
    fields: dict[str, Array | None], problem: str
) -> None:
    with pytest.raises(ProtocolError, match=f"group 7: {problem}"):
        decode_rollout(msgspec.structs.replace(ROLLOUT, **fields))


def test_token_counts_are_of_sampled_tokens() -> None:
    assert decode_rollout(ROLLOUT).token_counts() == {3: 1, 4: 2}
    assert decode_rollout(PAIR).token_counts() == {2: 1, 3: 2, 4: 1}


sample_specs = st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=8).map(
    lambda rows: SampleSpec([9] * len(rows), [v for v, _ in rows], mask=[int(m) for _, m in rows])
)


@given(st.lists(sample_specs, min_size=1, max_size=5))
def test_spans_give_each_token_its_version(specs: list[SampleSpec]) -> None:
    view = decode_rollout(scored(GroupSpec(samples=specs)).rollout)
    assert [sample.versions.tolist() for sample in view.rows] == [list(spec.versions) for spec in specs]
    assert [sample.sampled.tolist() for sample in view.rows] == [
        [bool(m) for m in spec.mask or []] for spec in specs
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"group": -1}, "group is not between 0 and"),
        ({"group": MAX_GROUPS}, "group is not between 0 and"),
        ({"lengths": Array.of([3, 1], "int32")}, r"tokens has shape \[5\], not \[4\]"),
        ({"lengths": Array.of([5], "int32")}, "spans row 2"),
        ({"lengths": Array.of([5, 0], "int32")}, "spans row 2"),
        ({"lengths": Array.of([6, -1], "int32")}, "lengths has a negative length"),
        ({"lengths": Array("int32", (0,), memoryview(b""))}, "lengths is empty"),
        ({"lengths": Array.of([[3, 2]], "int32")}, "lengths has shape"),
        ({"lengths": Array("int32", (2,), memoryview(b"123"))}, "lengths: array int32"),
        ({"tokens": Array.of([1], "int32")}, r"tokens has shape \[1\], not \[5\]"),
        ({"tokens": Array.of([5, 6, -7, 8, 9], "int32")}, "tokens has a negative token"),
        ({"tokens": Array.of([0] * 5, "int64")}, "tokens is int64, not int32"),
        ({"prompt_tokens": Array("int32", (0,), memoryview(b""))}, "prompt_tokens is empty"),
        ({"prompt_tokens": Array.of([-1], "int32")}, "prompt_tokens has a negative token"),
        ({"logprobs": Array.of([0.0] * 4, "float32")}, "logprobs has shape"),
        ({"logprobs": Array.of([0.0, float("nan"), 0.0, 0.0, 0.0], "float32")}, "logprobs is not finite"),
        (
            {"logprobs": Array.of([0.0, 1e-5, -1.0, 2e-4, -1.0], "float32")},
            "logprobs of sample 1 has 0.0002 for token 3, above 0",
        ),
        ({"loss_mask": Array.of([[1] * 5], "uint8")}, "loss_mask has shape"),
        ({"loss_mask": Array.of([1, 1, 2, 1, 1], "uint8")}, "loss_mask has a value other"),
        ({"responses": ("a",)}, "responses has 1 entries for 2 samples"),
        ({"finish_reasons": ()}, "finish_reasons has 0 entries for 2 samples"),
        ({"environment_rewards": Array.of([1.0], "float32")}, "environment_rewards has shape"),
        ({"spans": Array.of([], "int32")}, "spans has shape"),
        ({"spans": Array.of([1, 2], "int32")}, "spans has shape"),
        ({"spans": Array.of([[0, 3, 1]], "int32")}, "spans cover 3 of 5 tokens"),
        ({"spans": Array.of([[0, 3, 1], [1, 1, 1]], "int32")}, "spans cover 4 of 5 tokens"),
        ({"spans": Array.of([[0, 3, 1], [1, 3, 1]], "int32")}, r"spans row 1 \(1, 3, 1\) does not continue"),
        ({"spans": Array.of([[1, 2, 1], [0, 3, 1]], "int32")}, "spans row 0"),
        ({"spans": Array.of([[0, 3, 1], [1, 2, 1], [1, 2, 1]], "int32")}, "spans row 2"),
        ({"spans": Array.of([[0, 3, 1], [1, 2, 1], [2, 3, 1]], "int32")}, "spans row 2"),
        ({"spans": Array.of([[0, 3, -1], [1, 2, 1]], "int32")}, "spans row 0 has version -1"),
    ],
)
def test_a_message_whose_arrays_disagree_is_refused_by_group_and_field(
    change: dict[str, object], problem: str
) -> None:
    rollout: Rollout = msgspec.structs.replace(PAIR, **change)
    with pytest.raises(ProtocolError, match=f"^group {rollout.group}: {problem}"):
        decode_rollout(rollout)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"responses": ("only one",)}, "responses has 1 entries for 2 samples"),
        ({"branches": None}, "responses has 2 entries for 3 samples"),
        ({"lengths": Array.of([[2, 1]], "int32")}, r"lengths has shape \[1, 2\]"),
    ],
)
def test_lengths_of_a_rollout_that_contradicts_itself_are_refused(
    changed: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ProtocolError, match=problem):
        sample_lengths(msgspec.structs.replace(BRANCHED, **changed))

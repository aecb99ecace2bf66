"""Tests planning a step and building its parts: cases by hand, arrays that are refused, and the bound."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import BoundViolation, ProtocolError
from protocol.messages import ScoredRollout
from protocol.staleness import trainable_counts
from protocol.tensors import Array
from tests.protocol.samples import BRANCHED
from tests.trainer.groups import GroupSpec, SampleSpec, by_sample, routed, scored, whole
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.batch import SAMPLE_FIELDS, TOKEN_FIELDS, Batch, StepTotals, trained_tokens
from trainer.data.packing import balance
from trainer.data.samples import samples_of, token_counts
from trainer.step.plan import StepPlan, check_bound, plan_step

GRPO = make_algorithm(AlgorithmConfig(advantage_eps=0.5))


def plan(*specs: GroupSpec, step: int = 3, bound: int = 1, mask_late: bool = True) -> StepPlan:
    return plan_step(
        [(scored(spec), bound) for spec in specs],
        step=step,
        algorithm=GRPO,
        temperature=0.7,
        mask_late=mask_late,
    )


LATE = GroupSpec(
    group=7,
    prompt=[3, 4],
    samples=[
        SampleSpec([5, 6, 7], [1, 2, 3], reward=1.0, logprobs=[-0.1, -0.2, -0.3]),
        SampleSpec([8, 9], [3, 3], reward=0.0, mask=[0, 1], logprobs=[-9.0, -0.5]),
    ],
    generate_s=2.0,
)
FRESH = GroupSpec(group=8, prompt=[2], samples=[SampleSpec([5], [2], reward=2.0)], generate_s=4.0)


def test_batch_by_hand() -> None:
    batch = whole(plan(LATE, FRESH))
    assert batch.offsets.tolist() == [0, 5, 9, 11]
    assert by_sample(batch, batch.tokens) == [[3, 4, 5, 6, 7], [3, 4, 8, 9], [2, 5]]
    assert by_sample(batch, batch.sampled_mask.int()) == [[0, 0, 1, 1, 1], [0, 0, 0, 1], [0, 1]]
    assert by_sample(batch, batch.loss_mask.int()) == [[0, 0, 0, 1, 1], [0, 0, 0, 1], [0, 1]]
    assert by_sample(batch, batch.versions) == [[-1, -1, 1, 2, 3], [-1, -1, -1, 3], [-1, 2]]
    torch.testing.assert_close(
        batch.behaviour_logprobs, torch.tensor([0, 0, -0.1, -0.2, -0.3, 0, 0, 0, -0.5, 0, -1.0])
    )
    assert by_sample(batch, batch.advantages) == [[0, 0, 0, 0.5, 0.5], [0, 0, 0, -0.5], [0, 0]]
    assert batch.group_index.tolist() == [0, 0, 1]
    assert batch.rewards.tolist() == [1.0, 0.0, 2.0]
    torch.testing.assert_close(batch.weights, torch.tensor([1 / 9, 1 / 3, 1 / 3]))
    assert batch.measured.all()
    assert (batch.step, batch.temperature, batch.decoupled) == (3, 0.7, False)
    assert batch.totals == StepTotals(samples=3, trained_tokens=4, lag_max=1, fresh=True)


def test_counts_and_statistics_by_hand() -> None:
    planned = plan(LATE, FRESH)
    assert planned.trained_counts == {7: {2: 1, 3: 2}, 8: {2: 1}}
    stats = planned.stats
    assert stats.lag_histogram == {0: 2, 1: 2}
    assert (stats.lag_mean, stats.lag_max, stats.trained_tokens, stats.masked_tokens) == (0.5, 1, 4, 1)
    assert stats.masked_share == 0.2
    assert (stats.response_length_mean, stats.reward_mean, stats.generate_s) == (2.0, 1.0, 3.0)
    assert stats.reward_std == pytest.approx((2 / 3) ** 0.5)


def test_lag_is_split_at_the_end_of_the_groups_generation() -> None:
    """In step 5, group 7 was complete under version 3, group 8 under version 2; bound 4 trains all tokens."""
    stats = plan(LATE, FRESH, step=5, bound=4).stats
    assert stats.lag_histogram == {2: 2, 3: 2, 4: 1}
    in_flight, in_queue = [2, 1, 0, 0, 0], [2, 2, 2, 2, 3]
    assert stats.lag_in_flight_mean == pytest.approx(sum(in_flight) / 5)
    assert stats.lag_in_queue_mean == pytest.approx(sum(in_queue) / 5)
    assert stats.lag_in_flight_mean + stats.lag_in_queue_mean == pytest.approx(stats.lag_mean)


def test_groups_that_do_not_say_how_long_they_took_are_left_out() -> None:
    silent = replace(FRESH, group=9, generate_s=0.0)
    assert plan(LATE, silent).stats.generate_s == 2.0
    assert plan(silent).stats.generate_s is None


def test_prefix_hits_are_those_of_all_groups_together() -> None:
    assert plan(LATE, FRESH).stats.prefix_hit_rate is None
    found = plan(replace(LATE, read=(90, 60)), replace(FRESH, read=(30, 0))).stats
    assert found.prefix_hit_rate == 0.5


def test_cancelled_samples_are_counted_beside_those_that_are_trained() -> None:
    assert plan(LATE, FRESH).stats.cancelled_length_mean is None
    more = plan(replace(LATE, cancelled=(7, 0)), replace(FRESH, cancelled=(2,))).stats
    assert (more.cancelled_samples, more.cancelled_tokens, more.cancelled_length_mean) == (3, 9, 3.0)


def test_a_late_token_is_a_violation_without_masking() -> None:
    with pytest.raises(
        BoundViolation, match="group 7: token 0 of version 1 has lag 2 in step 3, over the bound of 1"
    ):
        plan(LATE, mask_late=False)
    assert plan(LATE, bound=2, mask_late=False).stats.masked_tokens == 0


def test_each_group_has_its_own_bound() -> None:
    groups = [(scored(LATE), 0), (scored(replace(LATE, group=9)), 2)]
    planned = plan_step(groups, step=3, algorithm=GRPO, temperature=1.0, mask_late=True)
    assert planned.trained_counts == {7: {3: 2}, 9: {1: 1, 2: 1, 3: 2}}


def test_a_group_without_fresh_tokens_has_an_empty_count() -> None:
    planned = plan(FRESH, step=9)
    assert planned.trained_counts == {8: {}}
    stats = planned.stats
    assert (stats.lag_max, stats.lag_mean, stats.lag_in_flight_mean, stats.lag_in_queue_mean) == (None,) * 4
    assert (stats.generate_s, stats.masked_tokens) == (4.0, 1)


def test_a_sample_without_tokens_is_carried_along() -> None:
    spec = GroupSpec(samples=[SampleSpec([], []), SampleSpec([5], [0]), SampleSpec([], [])])
    assert whole(plan(spec, step=0)).lengths.tolist() == [2, 3, 2]
    assert plan(GroupSpec(samples=[SampleSpec([], [])])).trained_counts == {0: {}}


@pytest.mark.parametrize("place", [0, 2])
def test_the_last_check_finds_what_masking_missed(place: int) -> None:
    spec = GroupSpec(samples=[SampleSpec([5, 6, 7], [0, 3, 3], mask=[0, 1, 1])])
    (sample,) = samples_of(scored(spec), 0, 1, 3)
    mask = sample.token_arrays(3)["loss_mask"]
    assert mask.tolist() == [False, False, False, True, True]
    check_bound(sample, mask, 3)
    with pytest.raises(BoundViolation, match="group 0: token 1 of version 1 has lag 2 in step 3, over"):
        check_bound(replace(sample, spans=sample.spans - [0, 2]), mask, 3)
    mask[place] = True
    with pytest.raises(BoundViolation, match="was not sampled"):
        check_bound(sample, mask, 3)


BROKEN = {
    "lengths": Array.of([6, -1], "int32"),
    "tokens": Array.of([5, 6, 7, 8], "int32"),
    "logprobs": Array.of([0.0, float("nan"), 0.0, 0.0, 0.0], "float32"),
    "loss_mask": Array.of([1, 1, 2, 1, 1], "uint8"),
    "spans": Array.of([[0, 3, 1], [1, 1, 2]], "int32"),
    "prompt_tokens": Array.of([], "int32"),
    "rewards": Array.of([0.0, float("inf")], "float32"),
}


@pytest.mark.parametrize("field", BROKEN)
def test_a_broken_array_is_refused_by_group_and_field(field: str) -> None:
    with pytest.raises(ProtocolError, match=rf"group 7: {field} "):
        plan_step(
            [(scored(LATE, **{field: BROKEN[field]}), 1)],
            step=3,
            algorithm=GRPO,
            temperature=1.0,
            mask_late=True,
        )


@pytest.mark.parametrize(
    "field", ["lengths", "tokens", "logprobs", "loss_mask", "spans", "prompt_tokens", "rewards"]
)
def test_an_array_of_another_dtype_is_refused(field: str) -> None:
    with pytest.raises(ProtocolError, match=rf"group 7: {field} is float64"):
        plan_step(
            [(scored(LATE, **{field: Array.of([1.0], "float64")}), 1)],
            step=3,
            algorithm=GRPO,
            temperature=1.0,
            mask_late=True,
        )


@pytest.mark.parametrize(
    "rows",
    [
        [[0, 2, 1], [1, 2, 3]],  # sample 0 not to its end
        [[0, 3, 1], [1, 2, 3], [1, 2, 3]],  # an empty span
        [[0, 4, 1], [1, 2, 3]],  # beyond the sample
        [[1, 2, 3], [0, 3, 1]],  # out of order
        [[0, 3, 1], [0, 2, 3]],
        [[0, 3, -1], [1, 2, 3]],
        [[0, 3, 1], [1, 2, 4]],  # from the future
        [[0, 3, 1], [2, 2, 3]],
    ],
)
def test_spans_must_cover_every_sample_exactly(rows: list[list[int]]) -> None:
    message = scored(LATE, spans=Array.of(rows, "int32"))
    with pytest.raises(ProtocolError, match="group 7: spans"):
        plan_step([(message, 9)], step=3, algorithm=GRPO, temperature=1.0, mask_late=True)


def test_lengths_must_sum_to_the_tokens() -> None:
    with pytest.raises(ProtocolError, match=r"group 7: tokens has shape \[5\], not \[4\]"):
        plan_step(
            [(scored(LATE, lengths=Array.of([2, 2], "int32")), 1)],
            step=3,
            algorithm=GRPO,
            temperature=1.0,
            mask_late=True,
        )


def test_a_group_twice_and_an_empty_batch_are_refused() -> None:
    with pytest.raises(ProtocolError, match="group 7: appears twice"):
        plan(LATE, LATE)
    with pytest.raises(ProtocolError, match="no samples"):
        plan()


sample_specs = st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=8).map(
    lambda rows: SampleSpec([9] * len(rows), sorted(v for v, _ in rows), mask=[int(m) for _, m in rows])
)
group_samples = st.lists(sample_specs, min_size=1, max_size=4)


@given(st.lists(st.tuples(group_samples, st.integers(0, 4)), min_size=1, max_size=3), st.integers(6, 9))
def test_trained_tokens_are_those_that_the_ledger_may_train(
    parts: list[tuple[list[SampleSpec], int]], step: int
) -> None:
    groups = [(scored(GroupSpec(group=g, samples=made)), bound) for g, (made, bound) in enumerate(parts)]
    planned = plan_step(groups, step=step, algorithm=GRPO, temperature=1.0, mask_late=True)
    batch = whole(planned)
    for message, bound in groups:
        counts = token_counts(message.rollout)
        assert planned.trained_counts[message.rollout.group] == trainable_counts(step, counts, bound)
    assert (batch.loss_mask <= batch.sampled_mask).all()
    assert (batch.versions[batch.sampled_mask] >= 0).all()
    assert (batch.versions[~batch.sampled_mask] == -1).all()
    assert (batch.advantages[~batch.loss_mask] == 0).all()
    assert (batch.behaviour_logprobs[~batch.sampled_mask] == 0).all()
    assert planned.stats.trained_tokens + planned.stats.masked_tokens == int(batch.sampled_mask.sum())
    within = all(step - v <= bound for message, bound in groups for v in token_counts(message.rollout))
    if within:
        plan_step(groups, step=step, algorithm=GRPO, temperature=1.0, mask_late=False)
    else:
        with pytest.raises(BoundViolation):
            plan_step(groups, step=step, algorithm=GRPO, temperature=1.0, mask_late=False)


@given(st.lists(group_samples, min_size=1, max_size=3), st.integers(1, 5), st.data())
def test_parts_of_any_partition_together_are_the_whole(
    made: list[list[SampleSpec]], pieces: int, data: st.DataObject
) -> None:
    planned = plan(*(GroupSpec(group=g, samples=samples) for g, samples in enumerate(made)), step=6, bound=3)
    batch = whole(planned)
    assert batch.lengths.tolist() == planned.lengths.tolist()
    costs = data.draw(st.lists(st.floats(0, 9), min_size=len(batch.weights), max_size=len(batch.weights)))
    for piece in balance(costs, pieces):
        part = planned.part(piece)
        assert (part.totals, part.offsets[0]) == (batch.totals, 0)
        assert_same(part, batch.select(torch.tensor(piece, dtype=torch.int64)))
        for place, sample in enumerate(piece):
            ours, theirs = (slice(*b.offsets[i : i + 2]) for b, i in ((part, place), (batch, sample)))
            for name in TOKEN_FIELDS[:6]:
                assert torch.equal(getattr(part, name)[ours], getattr(batch, name)[theirs])
            for name in SAMPLE_FIELDS:
                assert getattr(part, name)[place] == getattr(batch, name)[sample]


def assert_same(a: Batch, b: Batch) -> None:
    for name in ("offsets", *TOKEN_FIELDS[:6], *SAMPLE_FIELDS):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_recorded_experts_are_in_the_batch() -> None:
    groups = [(routed(LATE), 1), (scored(FRESH), 1)]
    planned = plan_step(groups, step=3, algorithm=GRPO)
    batch = whole(planned)
    assert batch.experts is not None
    assert by_sample(batch, batch.experts[:, 0, 0]) == [[3, 4, 5, 6, -1], [3, 4, 8, -1], [-1, -1]]
    assert by_sample(batch, batch.experts[:, 0, 1]) == [[0, 0, 0, 0, -1], [0, 0, 0, -1], [-1, -1]]
    part = batch.select(torch.tensor([2, 1]))
    assert part.experts is not None
    assert part.experts[:, 0, 0].tolist() == [-1, -1, 3, 4, 8, -1]
    others = plan_step([(routed(LATE, layers=2), 1), (scored(FRESH), 1)], step=3, algorithm=GRPO)
    assert len({planned.digest, others.digest, plan(LATE, FRESH).digest}) == 3


def test_experts_of_different_layers_are_refused() -> None:
    with pytest.raises(ProtocolError, match=r"group 8: experts of 2 layers, 2 each, .* have 1 and 2"):
        plan_step([(routed(LATE), 1), (routed(FRESH, layers=2), 1)], step=3, algorithm=GRPO)


def test_a_replica_without_samples_has_an_empty_part() -> None:
    part = plan(LATE).part([])
    assert (part.offsets.tolist(), len(part.tokens), len(part.weights)) == ([0], 0, 0)
    assert (part.totals.samples, len(trained_tokens(part).place)) == (2, 0)


@given(group_samples)
def test_a_batch_has_the_tokens_of_its_samples(made: list[SampleSpec]) -> None:
    batch = whole(plan(GroupSpec(prompt=[1, 2, 3], samples=made), step=6, bound=9))
    for sample, tokens, versions in zip(
        made, by_sample(batch, batch.tokens), by_sample(batch, batch.versions), strict=True
    ):
        assert tokens == [1, 2, 3, *sample.tokens]
        sampled = zip(sample.versions, sample.mask or [], strict=True)
        assert versions[3:] == [version if chosen else -1 for version, chosen in sampled]


CUT = GroupSpec(
    group=7,
    samples=[
        SampleSpec([5, 6, 7, 8], [3] * 4, reward=1.0, finish="length"),
        SampleSpec([5, 6], [3, 3], reward=1.0),
        SampleSpec([5, 6, 7], [2, 3, 3], reward=0.0),
    ],
)
"""One of three samples ended at the limit of 4 tokens."""


def truncated(how: str, **values: Any) -> StepPlan:
    config = AlgorithmConfig(name="dr_grpo", truncated=how, **values)
    return plan_step([(scored(CUT), 0)], step=3, algorithm=make_algorithm(config), max_tokens=4)


def test_a_masked_sample_has_no_gradient_and_counts_for_the_others_of_its_group() -> None:
    masked, trained = truncated("mask"), truncated("train")
    assert masked.rewards.tolist() == [1.0, 1.0, 0.0]
    torch.testing.assert_close(masked.advantages, torch.tensor([1 / 3, 1 / 3, -2 / 3]))
    assert torch.equal(masked.weights, trained.weights)  # its tokens keep their share, which nobody gets
    batch = whole(masked)
    assert by_sample(batch, batch.loss_mask.int()) == [[0] * 6, [0, 0, 1, 1], [0, 0, 0, 1, 1]]
    assert masked.trained_counts == {7: {3: 4}}
    stats = masked.stats
    assert (stats.trained_tokens, stats.masked_tokens, stats.truncated_tokens) == (4, 1, 4)
    assert (stats.truncated_share, stats.shaped_reward_mean) == (pytest.approx(1 / 3), None)
    assert (trained.stats.trained_tokens, trained.stats.truncated_tokens) == (8, None)
    assert masked.digest != trained.digest


def test_a_step_of_truncated_samples_alone_trains_nothing_if_they_are_masked() -> None:
    spec = GroupSpec(samples=[SampleSpec([5], [0], finish="length")] * 2)
    made = plan_step([(scored(spec), 1)], step=0, algorithm=make_algorithm(AlgorithmConfig(truncated="mask")))
    assert (made.trained_counts, made.stats.trained_tokens, made.totals.trained_tokens) == ({0: {}}, 0, 0)


def test_rewards_are_shaped_by_length_and_reported_apart() -> None:
    """With a limit of 4 and a buffer of 2, lengths 4, 2, 3 are punished by 1, 0, 0.5 times the penalty."""
    shaped = truncated("shape", overlong_buffer=2, overlong_penalty=0.4)
    torch.testing.assert_close(shaped.rewards, torch.tensor([0.6, 1.0, -0.2]))
    mean = 1.4 / 3
    torch.testing.assert_close(shaped.advantages, torch.tensor([0.6 - mean, 1.0 - mean, -0.2 - mean]))
    assert shaped.stats.reward_mean == pytest.approx(2 / 3)
    assert shaped.stats.shaped_reward_mean == pytest.approx(mean)
    assert shaped.stats.trained_tokens == truncated("train").stats.trained_tokens
    longer = truncated("shape", overlong_buffer=2, overlong_penalty=0.4, overlong_length=6)
    assert longer.rewards.tolist() == [1.0, 1.0, 0.0]


def test_a_plan_is_as_before_where_truncated_samples_are_trained() -> None:
    stopped = replace(CUT, samples=[replace(sample, finish="stop") for sample in CUT.samples])
    plain = plan_step([(scored(stopped), 0)], step=3, algorithm=make_algorithm(AlgorithmConfig()))
    cut = plan_step([(scored(CUT), 0)], step=3, algorithm=make_algorithm(AlgorithmConfig()), max_tokens=4)
    assert plain.digest == cut.digest


def branched() -> ScoredRollout:
    return ScoredRollout(rollout=BRANCHED, rewards=Array.of([1.0, 0.0], "float32"))


def test_the_branches_of_a_sample_share_its_reward_its_weight_and_its_mini_batch() -> None:
    for mini_batches in (1, 2):
        made = plan_step([(branched(), 2)], step=5, algorithm=GRPO, mini_batches=mini_batches)
        batch = whole(made)
        assert by_sample(batch, batch.tokens) == [[5, 6, 7, 8, 9], [5, 6, 7, 8, 11, 12], [5, 6, 7, 10]]
        assert by_sample(batch, batch.loss_mask.int()) == [[0] * 3 + [1, 1], [0] * 5 + [1], [0] * 3 + [1]]
        assert by_sample(batch, batch.advantages) == [[0] * 3 + [0.5, 0.5], [0] * 5 + [0.5], [0] * 3 + [-0.5]]
        samples = 2 if mini_batches == 1 else 1
        torch.testing.assert_close(batch.weights, torch.tensor([1 / 3, 1 / 3, 1.0]) / samples)
        assert batch.rewards.tolist() == [1.0, 1.0, 0.0]
        assert batch.mini_batch is not None
        assert batch.mini_batch[0] == batch.mini_batch[1]
        assert made.totals == StepTotals(samples=2, trained_tokens=4, lag_max=2, fresh=False)
        assert (made.stats.reward_mean, made.stats.response_length_mean) == (0.5, 2.5)
        assert made.trained_counts == {7: {3: 1, 4: 3}} == {7: token_counts(BRANCHED)}
        families = made.families(shared=mini_batches == 1)
        pieces, _ = made.mini_batches.divide(families, torch.Tensor.double, 2)
        assert any({0, 1} <= set(piece) for piece in pieces)
        assert sorted(row for piece in pieces for row in piece) == [0, 1, 2]


def test_the_bound_holds_for_every_branch() -> None:
    made = plan_step([(branched(), 1)], step=5, algorithm=GRPO)
    assert by_sample(whole(made), whole(made).loss_mask.int())[0] == [0, 0, 0, 0, 1]
    assert made.trained_counts == {7: {4: 3}}
    with pytest.raises(BoundViolation, match="token 0 of version 3 has lag 2"):
        plan_step([(branched(), 1)], step=5, algorithm=GRPO, mask_late=False)

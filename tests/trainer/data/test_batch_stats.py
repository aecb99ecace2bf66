"""Tests what is counted of a step's samples and groups by hand."""

import msgspec
import pytest

from protocol.tensors import Array
from tests.trainer.groups import GroupSpec, SampleSpec, scored
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.data.batch_stats import MAX_NAMES
from trainer.step.plan import plan_step


def test_groups_without_signal_are_counted_by_hand() -> None:
    """Rewards (1, 0) and (1, 1), and a group of one sample, which cannot differ."""
    rewards = ((1.0, 0.0), (1.0, 1.0), (2.0,))
    groups = [
        (scored(GroupSpec(n, samples=[SampleSpec([5], [0], reward) for reward in given])), 0)
        for n, given in enumerate(rewards)
    ]
    for chosen, share in ((groups, 0.5), (groups[2:], None)):
        planned = plan_step(chosen, step=0, algorithm=make_algorithm(AlgorithmConfig()))
        assert planned.stats.frac_reward_zero_std == share


def test_a_samples_own_prompt_is_in_no_length() -> None:
    """Its first two tokens are its prompt: without them it is as long as the other one."""
    spec = GroupSpec(
        samples=[SampleSpec([9, 9, 5, 6], [0] * 4, 1.0, mask=[0, 0, 1, 1]), SampleSpec([5, 6], [0, 0], 1.0)]
    )
    config = AlgorithmConfig(truncated="shape", overlong_length=4, overlong_buffer=2)
    groups = [(scored(spec, own_prompts=Array.of([2, 0], "int32")), 0)]
    planned = plan_step(groups, step=0, algorithm=make_algorithm(config))
    assert planned.rewards.tolist() == [1.0, 1.0]
    assert planned.stats.response_length_mean == 2.0


def test_rewards_by_source_and_scores_by_verifier_are_means_of_samples_by_hand() -> None:
    """Source a has rewards 1, 0, 1 and b has 2; the verifier math scored the first group alone."""
    given = (("a", (1.0, 0.0)), ("a", (1.0,)), ("b", (2.0,)), (None, (7.0,)), (5, (7.0,)))
    groups = []
    for number, (source, rewards) in enumerate(given):
        made = scored(GroupSpec(number, samples=[SampleSpec([5], [0], reward) for reward in rewards]))
        packed = msgspec.Raw(msgspec.msgpack.encode({} if source is None else {"source": source}))
        changes = (
            {"components": {"math": Array.of([0.5, 0.0], "float32")}, "score_s": 2.0} if not number else {}
        )
        rollout = msgspec.structs.replace(made.rollout, metadata=packed)
        groups.append((msgspec.structs.replace(made, rollout=rollout, **changes), 0))
    stats = plan_step(groups, step=0, algorithm=make_algorithm(AlgorithmConfig())).stats
    assert stats.reward_by_source == {"a": pytest.approx(2 / 3), "b": 2.0}
    assert stats.score_by_verifier == {"math": 0.25}
    assert stats.score_s == 2.0


def test_sources_beyond_the_limit_count_in_no_average() -> None:
    groups = []
    for number in range(MAX_NAMES + 3):
        made = scored(GroupSpec(number, samples=[SampleSpec([5], [0], 1.0)]))
        packed = msgspec.Raw(msgspec.msgpack.encode({"source": f"s{number}"}))
        groups.append(
            (msgspec.structs.replace(made, rollout=msgspec.structs.replace(made.rollout, metadata=packed)), 0)
        )
    stats = plan_step(groups, step=0, algorithm=make_algorithm(AlgorithmConfig())).stats
    assert len(stats.reward_by_source) == MAX_NAMES


def test_samples_of_one_token_at_most_are_not_counted_as_truncated() -> None:
    groups = [(scored(GroupSpec(samples=[SampleSpec([5], [0], 1.0, finish="length")] * 2)), 0)]
    algorithm = make_algorithm(AlgorithmConfig())
    shares = [
        plan_step(groups, step=0, algorithm=algorithm, max_tokens=limit).stats.truncated_share
        for limit in (1, 2)
    ]
    assert shares == [None, 1.0]

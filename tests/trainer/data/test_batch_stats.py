"""Tests what is counted of a step's samples and groups by hand."""

from protocol.tensors import Array
from tests.trainer.groups import GroupSpec, SampleSpec, scored
from trainer.algorithms import AlgorithmConfig, make_algorithm
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

"""Compares what turns are trained with with plain loops over numpy, and refuses what does not fit."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ProtocolError, SettingsError
from protocol.messages import ScoredRollout
from protocol.tensors import Array
from tests.trainer.groups import GroupSpec, SampleSpec, by_sample, scored, whole
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.data.samples import check_scored, has_signal
from trainer.roles.advantages import token_rewards
from trainer.step.plan import StepPlan, plan_step

EPS = 0.5
TWO_TURNS = [[0, 0, 0, 2], [0, 0, 3, 4], [1, 1, 0, 1], [1, 1, 2, 4], [2, 2, 0, 1]]
"""Tokens 0-1 and 3 of the first sample, 0 and 2-3 of the second, and the one of the third."""


def group(
    rewards: Sequence[float], turns: Sequence[Sequence[int]] = TWO_TURNS, number: int = 0, **changed: Any
) -> ScoredRollout:
    """Three samples of two, two and one turns; what the environment inserted is between them."""
    samples = [
        SampleSpec([5, 6, 7, 8], [3] * 4, mask=[1, 1, 0, 1], logprobs=[-1, -1, 0, -1]),
        SampleSpec([5, 6, 7, 8], [3] * 4, mask=[1, 0, 1, 1], logprobs=[-1, 0, -1, -1]),
        SampleSpec([9], [3]),
    ]
    given_turns = Array.of(turns, "int32")
    sums = [sum(r for r, turn in zip(rewards, turns, strict=True) if turn[0] == i) for i in range(3)]
    made = scored(
        GroupSpec(group=number, samples=samples), rewards=Array.of(sums, "float32"), turns=given_turns
    )
    return msgspec.structs.replace(made, turn_rewards=Array.of(rewards, "float32"), **changed)


def plan(*groups: ScoredRollout, algorithm: str = "grpo", **config: Any) -> StepPlan:
    made = make_algorithm(AlgorithmConfig(name=algorithm, advantage_eps=EPS, **config))
    return plan_step([(item, 1) for item in groups], step=3, algorithm=made)


def naive(algorithm: str, turn_rewards: list[list[list[float]]]) -> list[list[list[float]]]:
    """Advantages [groups][samples][turns], by loops: what a turn returns against the same turn of others."""
    returns = [[[sum(turns[k:]) for k in range(len(turns))] for turns in samples] for samples in turn_rewards]
    found = []
    for samples in returns:
        found.append([[0.0] * len(turns) for turns in samples])
        for i, turns in enumerate(samples):
            for k, value in enumerate(turns):
                same = [other[k] for other in samples if k < len(other)]
                others = [other[k] for j, other in enumerate(samples) if k < len(other) and j != i]
                centred = value - np.mean(same)
                found[-1][i][k] = {
                    "grpo": centred / (np.std(same) + EPS),
                    "dr_grpo": centred,
                    "rloo": value - np.mean(others) if others else 0.0,
                    "reinforce_plus_plus": value,  # before tokens are whitened
                }[algorithm]
    return found


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(-4, 4), min_size=5, max_size=5), min_size=1, max_size=3))
@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus"])
def test_tokens_have_the_advantage_of_their_turn(algorithm: str, rewards: list[list[int]]) -> None:
    groups = [group([float(r) for r in of_group], number=i) for i, of_group in enumerate(rewards)]
    batch = whole(plan(*groups, algorithm=algorithm))
    nested = [[[float(r) for r in g[:2]], [float(r) for r in g[2:4]], [float(g[4])]] for g in rewards]
    wanted = []
    for (a, b), (c, d), (e,) in naive(algorithm, nested):
        wanted += [[0, 0, a, a, 0, b], [0, 0, c, 0, d, d], [0, 0, e]]
    for found, expected in zip(by_sample(batch, batch.advantages), wanted, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_samples_of_one_turn_are_trained_as_without_turns() -> None:
    plain = GroupSpec(group=1, samples=[SampleSpec([5], [3], reward=r) for r in (1.0, 0.0)])
    alone, mixed = plan(scored(plain)), plan(group([0, 1, 0, 0, 3]), scored(plain))
    batch = whole(mixed)
    assert by_sample(batch, batch.advantages)[3:] == by_sample(whole(alone), whole(alone).advantages)
    # scores of whole samples alone: a turn returns the sample's reward
    outcome = plan(group([0, 1, 0, 0, 3])).part([0, 1])
    high, low = ((reward - 4 / 3) / (np.std([1, 0, 3]) + EPS) for reward in (1, 0))
    found = by_sample(outcome, outcome.advantages)
    np.testing.assert_allclose(found, [[0, 0, high, high, 0, 0.5], [0, 0, low, 0, -0.5, -0.5]], atol=1e-6)


def test_turns_change_the_digest_and_their_absence_does_not() -> None:
    without = msgspec.structs.replace(group([0, 1, 2, 0, 3]), turn_rewards=None)
    assert plan(without).turns is None
    assert (
        len({plan(without).digest, *(plan(group(r)).digest for r in ([0, 1, 2, 0, 3], [1, 0, 2, 0, 3]))}) == 3
    )


def test_branches_return_what_the_sample_made_after_them() -> None:
    rows = [SampleSpec([5, 6], [3, 3]), SampleSpec([7], [3]), SampleSpec([8], [3])]
    spec = GroupSpec(samples=rows, branches=[(0, -1, 0), (0, 0, 1), (1, -1, 0)])
    turns = [
        [0, 0, 0, 1],
        [0, 1, 0, 1],
        [0, 0, 1, 2],
        [1, 2, 0, 1],
    ]  # the branch is between two turns of row 0
    made = scored(spec, rewards=Array.of([7.0, 0.0], "float32"), turns=Array.of(turns, "int32"))
    made = msgspec.structs.replace(made, turn_rewards=Array.of([1.0, 2.0, 4.0, 0.0], "float32"))
    planned = plan(made, algorithm="ppo")
    assert planned.turns is not None
    assert [values.tolist() for values in planned.turns.returns] == [[7.0, 4.0], [6.0], [0.0]]
    batch = whole(planned)
    found = token_rewards(batch, AlgorithmConfig(name="ppo"))
    assert by_sample(batch, found) == [[0, 0, 3.0, 4.0], [0, 0, 0, 6.0], [0, 0, 0.0]]


def test_a_critic_sees_the_reward_of_a_turn_at_its_last_sampled_token() -> None:
    batch = whole(plan(group([0.5, 1, 2, -1, 3]), algorithm="ppo"))
    found = token_rewards(batch, AlgorithmConfig(name="ppo"))
    assert by_sample(batch, found) == [[0, 0, 0, 0.5, 0, 1], [0, 0, 2, 0, 0, -1], [0, 0, 3]]
    assert whole(plan(group([0.5, 1, 2, -1, 3]))).turn_rewards is None
    assert batch.select(torch.tensor([2])).turn_rewards is not None


def test_a_punishment_of_long_samples_counts_at_their_last_turn() -> None:
    shaped = {"truncated": "shape", "overlong_length": 4, "overlong_buffer": 2, "overlong_penalty": 1.0}
    planned = plan(group([0, 1, 2, 0, 3]), algorithm="dr_grpo", **shaped)
    assert planned.turns is not None
    assert [values.tolist() for values in planned.turns.returns] == [[0.0, 0.0], [1.0, -1.0], [3.0]]


def test_a_group_has_signal_where_a_turn_differs() -> None:
    assert has_signal(group([1, 0, 0, 1, 1]))
    assert not has_signal(group([1, 1, 1, 1, 2]))
    assert not has_signal(msgspec.structs.replace(group([1, 0, 0, 1, 1]), turn_rewards=None))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"turn_rewards": Array.of([1.0], "float32")}, r"turn_rewards has shape \[1\]"),
        ({"turn_rewards": Array.of([0, 1, 2, 0, float("nan")], "float32")}, "turn_rewards is not finite"),
        ({"turn_rewards": Array.of([0, 1, 2, 0, 4], "float32")}, "sample 2 add up to 4, not to its reward 3"),
        (
            {"rollout": scored(GroupSpec()).rollout, "rewards": Array.of([0.0], "float32")},
            "each sample is one",
        ),
    ],
)
def test_rewards_of_turns_that_do_not_fit_are_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        check_scored(msgspec.structs.replace(group([0, 1, 2, 0, 3]), **changed), 3)


def test_a_penalty_of_whole_samples_is_refused_with_turns() -> None:
    penalty = {"use_kl_in_reward": True, "kl_coef": 0.1}
    with pytest.raises(SettingsError, match=r"use_kl_in_reward: .* a verifier scores turns: turn it off"):
        plan(group([0, 1, 2, 0, 3]), **penalty)
    assert plan(group([0, 1, 2, 0, 3]), algorithm="ppo", **penalty).turns is not None

"""Tests a penalised reward where a sample has several branches."""

from dataclasses import replace

import torch

from protocol.messages import ScoredRollout
from protocol.tensors import Array
from tests.protocol.samples import BRANCHED
from trainer.algorithms import make_algorithm
from trainer.config import AlgorithmConfig
from trainer.roles.token_rewards import _penalised
from trainer.step.plan import plan_step


class OneReplica:
    """Backend of one rank, of which only the replicas are asked."""

    replicas = ((0,),)


def test_a_penalty_is_that_of_all_branches_of_a_sample() -> None:
    algorithm = make_algorithm(AlgorithmConfig(kl_coef=0.25, use_kl_in_reward=True))
    scored = ScoredRollout(rollout=BRANCHED, rewards=Array.of([1.0, 0.0], "float32"))
    made = plan_step([(scored, 2)], step=5, algorithm=algorithm)
    part = made.part([0, 1, 2])
    part = replace(part, reference_logprobs=torch.full_like(part.behaviour_logprobs, -1.0))
    penalised, mean = _penalised(part, OneReplica(), algorithm)  # type: ignore[arg-type]
    # log-probabilities -0.5, -1.25 and -0.25 of the first sample, -2 of the second, less -1 each
    expected = algorithm.advantages(torch.tensor([1 - 0.25 * 1.0, 0.25]), torch.tensor([0, 0]))
    assert mean == 0.0
    found = penalised.advantages[penalised.loss_mask]
    torch.testing.assert_close(found, expected[torch.tensor([0, 0, 0, 1])])

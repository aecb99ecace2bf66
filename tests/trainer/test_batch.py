"""Tests digests of batches: what changes them, and what does not."""

import re
from dataclasses import replace

import pytest

from tests.trainer.groups import GroupSpec, SampleSpec, scored
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.step.plan import StepPlan, plan_step

GROUP = GroupSpec(
    group=7,
    prompt=[3, 4],
    samples=[
        SampleSpec([5, 6, 7], [1, 2, 3], reward=1.0, logprobs=[-0.1, -0.2, -0.3]),
        SampleSpec([8, 9], [3, 3], reward=0.0, mask=[0, 1], logprobs=[-9.0, -0.5]),
    ],
)
OTHER = GroupSpec(group=8, prompt=[2], samples=[SampleSpec([5], [2], reward=2.0)])


def plan(*specs: GroupSpec, bound: int = 1, **changed: object) -> StepPlan:
    how = {"step": 3, "algorithm": make_algorithm(AlgorithmConfig()), "temperature": 0.7, **changed}
    return plan_step([(scored(spec), bound) for spec in specs], **how)  # type: ignore[arg-type]


def with_sample(**changed: object) -> GroupSpec:
    first, second = GROUP.samples
    return replace(GROUP, samples=[replace(first, **changed), second])  # type: ignore[arg-type]


def test_digests_have_a_form_of_their_own_and_do_not_depend_on_what_the_trainer_adds() -> None:
    digest = plan(GROUP, OTHER).digest
    assert re.fullmatch("[0-9a-f]{32}", digest)
    assert plan(GROUP, OTHER, decoupled=True, mismatch_share=0.0).digest == digest
    assert plan(replace(GROUP, generate_s=3.0), OTHER).digest == digest


@pytest.mark.parametrize(
    "changed",
    [
        plan(OTHER, GROUP),
        plan(GROUP, OTHER, step=4),
        plan(GROUP, OTHER, temperature=0.8),
        plan(GROUP, OTHER, bound=0),
        plan(GROUP, OTHER, algorithm=make_algorithm(AlgorithmConfig(name="dr_grpo"))),
        plan(replace(GROUP, prompt=[3]), OTHER),
        plan(with_sample(tokens=[5, 6, 8]), OTHER),
        plan(with_sample(versions=[1, 3, 3]), OTHER),
        plan(with_sample(reward=0.5), OTHER),
        plan(with_sample(mask=[1, 0, 1]), OTHER),
        plan(with_sample(logprobs=[-0.1, -0.2, -0.4]), OTHER),
        # the same tokens one after the other, cut elsewhere
        plan(replace(GROUP, prompt=[3]), replace(OTHER, prompt=[4, 2])),
    ],
)
def test_every_number_changes_the_digest(changed: StepPlan) -> None:
    assert changed.digest != plan(GROUP, OTHER).digest

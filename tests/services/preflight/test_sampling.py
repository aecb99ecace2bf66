"""Tests that training is refused where engines would sample from another distribution than the trainer's."""

import dataclasses

import pytest
import torch

from protocol.errors import SettingsError
from rollout.config import SamplingConfig
from rollout.engines.base import Sampling
from rollout.engines.sampling import sampled_distribution
from services.preflight.problem import Problem, refuse
from services.preflight.sampling import determinism_problems, distribution_problems, group_problems
from services.settings.load import load_settings
from tests.integration.loop import ROOT
from trainer.functional.logprobs import token_logprobs

DEMO = str(ROOT / "deploy/configs/demo.toml")
REPEATED = ["run.deterministic=true", "bound.staleness_policy=wait"]


def refused(**values: float) -> list[str]:
    problems = distribution_problems(dataclasses.replace(SamplingConfig(), **values))  # type: ignore[arg-type]
    return [problem.setting for problem in problems]


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        ({}, []),
        ({"temperature": 0.6}, []),
        ({"temperature": 0.01}, []),
        ({"temperature": 0.009}, ["sampling.temperature"]),
        ({"top_p": 0.6}, ["sampling.top_p"]),
        ({"top_k": 5}, ["sampling.top_k"]),
        ({"top_p": 0.99, "top_k": 1}, ["sampling.top_p", "sampling.top_k"]),
    ],
)
def test_distribution_problems_name_what_the_trainer_does_not_compute(
    values: dict[str, float], settings: list[str]
) -> None:
    assert refused(**values) == settings


@pytest.mark.parametrize(
    ("sampling", "equal"),
    [
        (Sampling(1), True),
        (Sampling(1, temperature=0.6), True),
        (Sampling(1, temperature=1.7), True),
        (Sampling(1, top_p=0.6), False),
        (Sampling(1, top_k=3), False),
    ],
)
def test_distribution_problems_are_where_ratios_are_not_one_at_equal_weights(
    sampling: Sampling, equal: bool
) -> None:
    logits = torch.randn(16, generator=torch.Generator().manual_seed(1))
    engine = sampled_distribution(logits, sampling)
    token = int(engine.argmax())
    trainer, _ = token_logprobs(logits[None], torch.tensor([token]), sampling.temperature or 1.0)
    ratio = float((trainer[0] - engine[token]).exp())
    assert (abs(ratio - 1) < 1e-6) == equal
    found = refused(temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k)
    assert (found == []) == equal


def test_sampling_has_no_other_way_to_change_the_distribution() -> None:
    """No penalty, min_p, bias or list of words can be asked of an engine: a new field has to be thought of in
    `distribution_problems`."""
    names = {field.name for field in dataclasses.fields(Sampling)}
    assert names == {"max_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "seed"}
    names = {field.name for field in dataclasses.fields(SamplingConfig)}
    # `keep_first` chooses among whole samples, which `tether check` warns of
    assert names == {"samples_per_prompt", "keep_first", "temperature", "top_p", "top_k", "max_tokens"}


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("override", ["sampling.samples_per_prompt=1", "sampling.temperature=0"])
def test_group_problems_name_what_gives_no_advantage(algorithm: str, override: str) -> None:
    settings = load_settings(None, [override, f"algorithm.name={algorithm}"], environ={})
    (problem,) = group_problems(settings)
    assert problem.setting == override.partition("=")[0]
    assert list(group_problems(load_settings(None, [], environ={}))) == []


@pytest.mark.parametrize(("samples", "found"), [(1, ["algorithm.opd_reward_coef"]), (2, [])])
def test_group_problems_name_rewards_that_distillation_would_not_read(samples: int, found: list[str]) -> None:
    distilled = ["algorithm.name=on_policy_distillation", f"sampling.samples_per_prompt={samples}"]
    settings = load_settings(None, [*distilled, "algorithm.opd_reward_coef=0.5"], environ={})
    assert [problem.setting for problem in group_problems(settings)] == found
    assert list(group_problems(load_settings(None, distilled, environ={}))) == []


def test_refuse_states_the_first_problem_and_counts_the_others() -> None:
    refuse([])
    problems = [Problem("it is wrong", "change it", "a.b", 3), Problem("no model"), Problem("no prompts")]
    with pytest.raises(SettingsError) as caught:
        refuse(problems)
    assert str(caught.value) == ("setting a.b = 3: it is wrong; change it (2 more: `tether check` lists all)")


def test_the_demo_can_be_repeated() -> None:
    assert list(determinism_problems(load_settings(DEMO, REPEATED, environ={}))) == []


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ("engine.name=sglang", "'sglang'"),
        ("engine.name=megatron", "'megatron'"),
        ("bound.staleness_policy=mask", "bound.staleness_policy 'mask'"),
        ("algorithm.filter_groups=true", "algorithm.filter_groups"),
        ("sampling.keep_first=2", "sampling.keep_first"),
        ("trainer.publish_every=2", "trainer.publish_every is 2"),
        ("engine.drafts=history", "engine.drafts"),
        ("engine.arguments={enable_prefix_caching=true}", "enable_prefix_caching"),
        ("services.pool=[{count=2}]", "services.pool"),
    ],
)
def test_setting_that_lets_speed_decide_is_refused(changed: str, named: str) -> None:
    problems = list(determinism_problems(load_settings(DEMO, [*REPEATED, changed], environ={})))
    assert any(named in str(problem) for problem in problems)
    assert all(str(problem).startswith("setting run.deterministic: ") for problem in problems)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ("engine.name=hf", ""),
        ("engine.name=vllm", "engine 'hf'"),
        ("sampling.keep_first=2", "sampling.keep_first"),
        ("parallel.data_parallel_size=2", "2 ranks"),
    ],
)
def test_run_without_lockstep_needs_what_a_rerun_can_make(changed: str, named: str) -> None:
    given = ["run.deterministic=true", "run.lockstep=false", "engine.name=hf", changed]
    problems = [str(problem) for problem in determinism_problems(load_settings(DEMO, given, environ={}))]
    assert [named in problem for problem in problems] == [True] * bool(named)

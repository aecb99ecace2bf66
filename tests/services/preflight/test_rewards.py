"""Tests which shares of a GPU's memory are refused where reward models are on it, too."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reward.config import RewardConfig, VerifierConfig
from rollout.config import EnvironmentConfig
from rollout.prompts.base import Prompt
from services.preflight.rewards import reward_gpu_problems, trial_problems, verifier_problems
from services.settings.processes import ServicesConfig
from services.settings.sections import Settings
from tests.services.preflight.test_check import demo


def problems(
    *, trainer: float = 1.0, workers: int = 1, gpus: str = "0", colocated: bool = False, **options: Any
) -> list[str]:
    given = {"path": "there", "engine": "vllm", "device": "cuda", **options}
    base = Settings()
    settings = replace(
        base,
        services=ServicesConfig(trainer_gpus="0,1", rollout_gpus="1,2", reward_gpus=gpus),
        trainer=replace(base.trainer, memory_fraction=trainer),
        engine=replace(base.engine, memory_fraction=0.4),
        colocated=replace(base.colocated, enabled=colocated),
        reward=RewardConfig(verifiers=(VerifierConfig("reward_model", options=given),), workers=workers),
    )
    return [str(problem) for problem in reward_gpu_problems(settings)]


@pytest.mark.parametrize(
    "fits",
    [
        {"trainer": 0.7},
        {"gpus": "3"},
        {"device": "cpu"},
        {"engine": "transformers"},
        {"trainer": 0.3, "gpus": "1"},
        {"trainer": 0.7, "gpus": "1", "colocated": True},
        {"trainer": 0.7, "device": "cuda:1", "gpus": "1,0"},
    ],
)
def test_shares_that_fit_are_accepted(fits: dict[str, Any]) -> None:
    assert problems(**fits) == []


@pytest.mark.parametrize(
    ("too_much", "text"),
    [
        ({"trainer": 0.8}, "GPU 0 exceed 1: trainer.memory_fraction 0.8 and 0.3 for reward models"),
        ({"trainer": 0.7, "workers": 2}, "and 0.6 for reward models"),
        (
            {"gpus": "1,0", "trainer": 0.4, "tensor_parallel_size": 2},
            "GPU 1 exceed 1: trainer.memory_fraction 0.4 and ",
        ),
        ({"gpus": "3,0", "engine": "sglang", "tensor_parallel_size": 2}, "GPU 0 exceed 1: "),
        ({"gpus": "2", "memory_fraction": 0.7}, "GPU 2 exceed 1: engine.memory_fraction 0.4 and 0.7"),
    ],
)
def test_shares_of_more_than_a_gpu_are_refused(too_much: dict[str, Any], text: str) -> None:
    (problem,) = problems(**too_much)
    assert text in problem
    assert problem.startswith("setting services.reward_gpus")


@pytest.mark.parametrize(
    ("environment", "count"),
    [("single_turn", 1), ("given", 1), ("tools", 1), ("gsm8k", 0), ("agent", 0), ("my_game:play", 0)],
)
def test_without_verifiers_the_environment_has_to_reward(environment: str, count: int) -> None:
    settings = replace(
        Settings(), environment=EnvironmentConfig(environment), reward=RewardConfig(verifiers=())
    )
    assert len(list(verifier_problems(settings, []))) == count


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        ((), 1),
        (('reward.verifiers=[{name="math",weight=0,fallback="positions"},{name="positions"}]',), 1),
        (('reward.verifiers=[{name="exact_match",weight=0},{name="positions",weight=-1}]',), 0),
        (('environment.name="guess_number"',), 0),
        (('environment.name="guess_number"', "reward.environment_weight=0"), 1),
        (('environment.name="guess_number"', "reward.environment_weight=0", "reward.verifiers=[]"), 1),
        (('reward_model.path="there"',), 0),
        (('reward_model.path="there"', "reward_model.weight=0"), 1),
        (('algorithm.name="sft"', 'environment.name="given"'), 0),
        (('algorithm.name="on_policy_distillation"', 'teacher.path="there"'), 0),
    ],
)
def test_rewards_whose_weights_are_all_zero_are_refused(
    tmp_path: Path, overrides: tuple[str, ...], count: int
) -> None:
    zero = 'reward.verifiers=[{name="exact_match",weight=0}]'
    found = [*verifier_problems(demo(tmp_path / "run", zero, *overrides), [])]
    assert [problem.setting for problem in found] == ["reward.verifiers"] * count
    assert all("every reward would be 0" in problem.cause for problem in found)


def test_verifiers_of_one_name_are_refused() -> None:
    settings = replace(Settings(), reward=RewardConfig(verifiers=(VerifierConfig(), VerifierConfig())))
    (problem,) = verifier_problems(settings, [])
    assert "each needs a name of its own" in str(problem)


@pytest.mark.parametrize(("samples", "count"), [(1, 0), (4, 1)])
def test_a_function_of_a_group_is_tried_on_a_group(tmp_path: Path, samples: int, count: int) -> None:
    (tmp_path / "one_score.py").write_text("def score(*, responses):\n    return [1.0]\n")
    function = VerifierConfig("function", options={"path": "one_score:score"})
    settings = Settings(reward=RewardConfig(verifiers=(function,)))
    settings = replace(settings, sampling=replace(settings.sampling, samples_per_prompt=samples))
    found = trial_problems(settings, [Prompt("1+1=")], [str(tmp_path)])
    assert len(list(found)) == count


@pytest.mark.parametrize(
    ("name", "answer", "count"),
    [
        ("exact_match", ["9"], 1),
        ("exact_match", 9, 0),
        ("math", {"value": 9}, 1),
        ("last_integer", "nine", 1),
        ("positions", "9", 0),
        ("positions", None, 1),
    ],
)
def test_an_answer_that_a_verifier_cannot_compare_with_is_named(
    name: str, answer: object, count: int
) -> None:
    settings = Settings(reward=RewardConfig(verifiers=(VerifierConfig(name),)))
    prompts = [
        Prompt("4+5=", metadata={"answer": "9"}, index=0),
        Prompt("4+5=", metadata={"answer": answer}, index=1),
    ]
    problems = [str(problem) for problem in verifier_problems(settings, prompts)]
    assert [problem.partition(":")[0] for problem in problems] == [
        f"verifier {name}, tried on prompt 1"
    ] * count


def test_answers_are_missing_in_some_prompts_or_all() -> None:
    settings = Settings(reward=RewardConfig(verifiers=(VerifierConfig("math"),)))
    without = Prompt("4+5=", metadata={"source": "x"}, index=1)
    (some,) = verifier_problems(settings, [Prompt("4+5=", metadata={"answer": "9"}, index=0), without])
    assert str(some) == "verifier math, tried on prompt 1: the metadata has no field 'answer', but source"
    (every,) = verifier_problems(settings, [without])
    assert "it needs the field 'answer' of a prompt, and the prompts have source" in str(every)


@pytest.mark.parametrize(
    ("verifiers", "count"),
    [
        ((VerifierConfig("last_integer"), VerifierConfig("math")), 1),
        ((VerifierConfig("last_integer", fallback="math"), VerifierConfig("math")), 0),
        ((VerifierConfig("math", fallback="last_integer"), VerifierConfig("last_integer")), 0),
    ],
)
def test_a_verifier_may_fail_on_an_answer_where_another_scores_it(
    verifiers: tuple[VerifierConfig, ...], count: int
) -> None:
    settings = Settings(reward=RewardConfig(verifiers=verifiers))
    assert len(list(verifier_problems(settings, [Prompt("1:2=", metadata={"answer": "1/2"})]))) == count

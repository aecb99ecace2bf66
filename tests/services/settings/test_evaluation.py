"""Tests section `[eval]`: its engine, the score of the best version, and what it excludes."""

import pytest

from protocol.errors import SettingsError
from services.settings.evaluation import best_score, eval_engine, pass_at_k_values, read_sets
from services.settings.load import load_settings
from services.settings.sections import EvalConfig, Settings


def loaded(*overrides: str) -> Settings:
    return load_settings(None, ["eval.every=2", *overrides], environ={})


def test_ks_are_powers_of_two_up_to_the_samples() -> None:
    assert [pass_at_k_values(samples) for samples in (0, 1, 2, 7, 8)] == [
        [],
        [1],
        [1, 2],
        [1, 2, 4],
        [1, 2, 4, 8],
    ]


def test_best_score_names_set_and_metric() -> None:
    assert best_score(EvalConfig()).metric == "greedy"
    found = best_score(EvalConfig(samples=4, best="gsm8k/pass@4"))
    assert (found.set, found.metric) == ("gsm8k", "pass@4")


@pytest.mark.parametrize("best", ["greedy", "math/", "math/pass@3", "math/pass@8", "math/loss"])
def test_score_that_is_not_measured_is_refused(best: str) -> None:
    with pytest.raises(SettingsError, match=r"setting eval\.best: .*greedy, sampled, pass@1, pass@2, pass@4"):
        best_score(EvalConfig(samples=4, best=best))


def test_engine_of_the_evaluation_differs_where_it_says_so() -> None:
    settings = loaded("engine.max_model_len=64", 'eval.engine={name="hf", threads=2}')
    engine = eval_engine(settings)
    assert (engine.name, engine.threads, engine.max_model_len) == ("hf", 2, 64)
    assert settings.engine.name == "vllm"


def test_engine_of_the_evaluation_leaves_a_trained_head_out() -> None:
    trained = ("engine.drafts=model", "engine.draft_model=/heads/eagle", "engine.draft_lr=1e-4")
    settings = loaded("trainer.backend=fsdp", *trained)
    assert (settings.engine.trained_head, eval_engine(settings).trained_head) == ("/heads/eagle", "")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (['eval.engine={nam="hf"}'], r"eval\.engine\.nam is not known"),
        (["eval.engine={threads=0}"], r"setting eval\.engine\.threads: 0"),
        (['eval.engine={dtype="bfloat16"}'], r"setting eval\.engine\.dtype: bfloat16"),
        (["lora.rank=4", 'eval.engine={name="scripted"}'], r"setting eval\.engine\.name: .*adapters"),
        (["colocated.enabled=true"], r"setting eval\.every: .*services\.eval_gpus"),
        (["services.trainer_gpus=0"], r"setting services\.eval_gpus is empty"),
        (
            ["colocated.enabled=true", "services.trainer_gpus=0", "services.eval_gpus=0"],
            r"setting services\.eval_gpus: '0', but with colocated\.enabled",
        ),
        (
            ["services.eval_gpus=0", "eval.engine={tensor_parallel_size=2}"],
            r"'0' names 1 GPUs, the engine of the evaluation has tensor_parallel_size 2",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        loaded(*overrides)


def test_set_that_does_not_exist_is_refused() -> None:
    prompts = ('prompts.path="deploy/examples/max3/prompts.jsonl"', "prompts.held_out=5")
    assert {name: len(found) for name, found in read_sets(loaded(*prompts)).items()} == {"held_out": 5}
    with pytest.raises(SettingsError, match="no held-out set 'math', only held_out"):
        read_sets(loaded(*prompts, "eval.best=math/greedy"))
    with pytest.raises(SettingsError, match="no held-out prompts to score on"):
        read_sets(loaded(prompts[0]))

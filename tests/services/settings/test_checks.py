"""Settings that each are right, and exclude each other."""

import pytest

from protocol.errors import SettingsError
from rollout.environments.registry import ENVIRONMENTS
from services.settings.load import load_settings


@pytest.mark.parametrize("name", ENVIRONMENTS.having("has_sessions"))
@pytest.mark.parametrize("setting", ["trainer.routing_replay", "engine.enable_return_routed_experts"])
def test_no_environment_of_sessions_records_experts(setting: str, name: str) -> None:
    with pytest.raises(
        SettingsError, match=f"setting {setting}: environment '{name}' does not record experts"
    ):
        load_settings(None, [f"{setting}=true", "engine.name=hf", f"environment.name={name}"], environ={})


def test_tools_that_are_recorded_record_no_experts() -> None:
    asked = ["trainer.routing_replay=true", "engine.name=hf", "environment.name=tools"]
    with pytest.raises(SettingsError, match=r"'tools' does not record experts yet; set environment\.record"):
        load_settings(None, asked, environ={})
    with pytest.raises(SettingsError, match="backend 'reference' cannot replay routing"):
        load_settings(None, [*asked, "environment.record=off", "trainer.backend=reference"], environ={})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["sampling.keep_first=8"], "keep_first: 8 of sampling.samples_per_prompt 8 samples"),
        (["sampling.keep_first=1"], "keep_first: 1 of sampling.samples_per_prompt 8 samples"),
        (["sampling.keep_first=6", "environment.name=agent"], "keep_first: environment 'agent' records"),
        (["sampling.keep_first=6", "environment.name=tools"], "keep_first: environment 'tools' records"),
        (["sampling.keep_first=2", "bound.groups_per_step=2", "trainer.num_mini_batches=5"],
         "5 mini-batches for the 4 samples of a step .bound.groups_per_step x sampling.keep_first."),
    ],
)  # fmt: skip
def test_kept_samples_are_two_or_more_of_a_group_without_records(changes: list[str], said: str) -> None:
    many = "sampling.samples_per_prompt=8"
    with pytest.raises(SettingsError, match=said):
        load_settings(None, [many, *changes], environ={})
    assert load_settings(None, [many, "sampling.keep_first=6"], environ={}).sampling.kept_samples == 6


FULL = ["rollout.groups_in_flight=1025", "sampling.samples_per_prompt=8"]
LONG = ["environment.max_turns=257"]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (FULL, "1025 groups of sampling.samples_per_prompt 8 are 8200 sessions at once.* 8192 connections; "
         "set it to 1024 or less"),
        (["rollout.groups_in_flight=1", "sampling.samples_per_prompt=9000"],
         "are 9000 sessions at once.*; set samples_per_prompt to 8192 or less"),
        (LONG, "setting environment.max_turns: 257 is above environment.options.max_calls, 256, after"),
        (["environment.max_turns=9", "environment.options={max_calls=8}"], "max_turns: 9 .*max_calls, 8,"),
        (["render.system=Think."], "setting render.system: 'Think.' would be in no request"),
        (["render.suffix= Now."], "setting render.suffix: ' ?Now.' would be in no request"),
    ],
)  # fmt: skip
def test_setting_that_a_worker_cannot_serve_is_refused(asked: list[str], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        load_settings(None, [*asked, "environment.name=server"], environ={})


def test_environments_without_an_endpoint_have_no_such_limits() -> None:
    load_settings(None, [*FULL, *LONG], environ={})
    edge = ["rollout.groups_in_flight=1024", "sampling.samples_per_prompt=8", "environment.max_turns=256"]
    load_settings(None, [*edge, "environment.name=server"], environ={})


@pytest.mark.parametrize("steps", ["[3]", "[5,4]", "[1,2,3]"])
def test_profile_steps_are_the_first_and_the_last(steps: str) -> None:
    with pytest.raises(SettingsError, match=r"setting trainer\.profile_steps: .*first and the last step"):
        load_settings(None, [f"trainer.profile_steps={steps}"], environ={})
    assert load_settings(None, ["trainer.profile_steps=[4,4]"], environ={}).trainer.is_profiled(4)


TRAINED = (
    "engine.name=vllm",
    "engine.drafts=model",
    "engine.draft_model=/heads/eagle",
    "engine.draft_lr=1e-4",
    "trainer.backend=fsdp",
)


def check_trained(*overrides: str) -> None:
    load_settings(None, [*TRAINED, *overrides], environ={})


def test_head_is_trained_on_the_rank_of_the_backends_that_have_states() -> None:
    check_trained()
    check_trained("trainer.backend=reference", "lora.rank=0")
    check_trained(
        "services.pool=[{ engine = { drafts = 'history', draft_model = '' } }, {}]"
    )  # that takes no head


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engine.draft_model=''", "there is no head to train; .* in engine.draft_model, or set it to 0"),
        ("trainer.backend=megatron", "'megatron' gives no hidden states; use fsdp or reference"),
        ("parallel.data_parallel_size=2", r"on one rank, and \[parallel\] has 2"),
        ("run.deterministic=true", "not reproducible; remove run.deterministic"),
        ("colocated.enabled=true", r"\(colocated.enabled\) has no idle time"),
        ("services.pool=[{ engine = { draft_model = '/b' } }]", "name no other draft_model"),
    ],
)  # fmt: skip
def test_settings_under_which_no_head_can_be_trained_are_refused_by_name(override: str, words: str) -> None:
    with pytest.raises(SettingsError, match=rf"setting engine\.draft_lr: .*{words}"):
        check_trained(override)


def test_head_is_not_trained_where_the_engine_shares_the_weights() -> None:
    shared = ("weights.transport=shared", "trainer.backend=reference", "services.rollouts=1")
    with pytest.raises(SettingsError, match="one copy of the weights, the engine's; use shm"):
        check_trained(*shared)

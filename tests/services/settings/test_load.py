"""Tests where settings come from, what is refused, and what the settings file of a run holds."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from protocol.staleness import Bound, Policy
from protocol.validation import range_of
from services.settings.load import dump_settings, load_settings
from services.settings.sections import Settings
from services.settings.sources import OTHER_VARIABLES, SHORT_NAMES
from tests.docs.pages import program
from tests.integration.loop import ROOT


def load(path: Path | None = None, *overrides: str, **variables: str) -> Settings:
    return load_settings(str(path) if path else None, overrides, environ=variables)


def refusal(path: Path | None = None, *overrides: str, **variables: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load(path, *overrides, **variables)
    return str(caught.value)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text("[bound]\nmax_staleness = 2\ngroups_per_step = 3\n")
    return path


# -- precedence
def test_defaults_are_those_of_the_readme() -> None:
    settings = load()
    assert settings.bound.bound == Bound(1, 8, Policy.MASK)
    assert settings.bound.max_attempts == 5
    assert settings.ledger.url == ""


def test_the_file_beats_the_defaults(toml: Path) -> None:
    assert load(toml).bound.bound == Bound(2, 3, Policy.MASK)


def test_the_environment_beats_the_file(toml: Path) -> None:
    assert load(toml, TETHER_MAX_STALENESS="4").bound.bound == Bound(4, 3, Policy.MASK)


def test_set_beats_the_environment(toml: Path) -> None:
    assert load(toml, "bound.max_staleness=0", TETHER_MAX_STALENESS="4").bound.bound == Bound(
        0, 3, Policy.MASK
    )


def test_the_last_set_counts() -> None:
    assert load(None, "run.steps=1", "run.steps=2").run.steps == 2


def test_an_empty_variable_sets_nothing(toml: Path) -> None:
    assert load(toml, TETHER_MAX_STALENESS="").bound.max_staleness == 2


def test_the_file_may_be_named_by_a_variable(toml: Path) -> None:
    assert load(None, TETHER_CONFIG=str(toml)).bound.max_staleness == 2


def test_a_given_file_beats_the_one_of_the_variable(toml: Path, tmp_path: Path) -> None:
    assert load(toml, TETHER_CONFIG=str(tmp_path / "nowhere.toml")).bound.max_staleness == 2


# -- names
@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("TETHER_MAX_STALENESS", "3", 3),
        ("TETHER_GROUPS_PER_STEP", "12", 12),
        ("TETHER_STALENESS_POLICY", "drop", Policy.DROP),
        ("TETHER_MAX_ATTEMPTS", "7", 7),
        ("TETHER_REDIS_URL", "redis://host:1/0", "redis://host:1/0"),
        ("TETHER_RUN", "mine", "mine"),
        ("TETHER_RUN_DIR", "/some/where", "/some/where"),
        ("TETHER_STEPS", "9", 9),
    ],
)
def test_every_short_name_sets_its_setting(variable: str, text: str, value: object) -> None:
    section, key = SHORT_NAMES[variable].split(".")
    assert getattr(getattr(load(None, **{variable: text}), section), key) == value


def test_every_short_name_is_tested_and_documented() -> None:
    documented = set(re.findall(r"`(TETHER_[A-Z_]+[A-Z])`", (ROOT / "docs/commands.md").read_text()))
    assert set(SHORT_NAMES) <= documented
    compose = set(re.findall(r"\$\{(TETHER_[A-Z_]+)", (ROOT / "deploy/compose.yaml").read_text()))
    assert documented <= set(SHORT_NAMES) | OTHER_VARIABLES | compose | {"TETHER_SECTION__KEY"}


@pytest.mark.parametrize("name", sorted(OTHER_VARIABLES - {"TETHER_CONFIG"}))
def test_variables_that_are_read_elsewhere_are_let_through(name: str) -> None:
    assert load(None, **{name: "DEBUG"}) == Settings()


def test_a_variable_names_a_section_and_a_key() -> None:
    settings = load(
        None, TETHER_SAMPLING__MAX_TOKENS="77", TETHER_ENGINE__KV="keep", TETHER_MONITOR__ENABLED="false"
    )
    assert (settings.sampling.max_tokens, settings.engine.kv, settings.monitor.enabled) == (77, "keep", False)


def test_a_variable_reaches_into_a_nested_section() -> None:
    scratch = load(None, TETHER_MODEL__SCRATCH__HIDDEN_SIZE="96").model.scratch
    assert scratch is not None
    assert scratch.hidden_size == 96


def test_values_are_toml() -> None:
    settings = load(
        None,
        'reward.verifiers=[{name="math", weight=0.5}]',
        'prompts.families=["chain_sum"]',
        "optimizer.lr=1e-4",
    )
    assert [(verifier.name, verifier.weight) for verifier in settings.reward.verifiers] == [("math", 0.5)]
    assert settings.prompts.families == ("chain_sum",)
    assert settings.optimizer.lr == 1e-4


@pytest.mark.parametrize("text", ["2024", "true", "2024-01-02", '"2024"'])
def test_text_stays_text_where_text_is_wanted(text: str) -> None:
    plain = text.strip('"')
    scratch = load(None, f"model.scratch.vocabulary={text}").model.scratch
    assert scratch is not None
    assert scratch.vocabulary == plain
    assert load(None, TETHER_RUN=text).run.name == plain
    assert load(None, f"run.name={text}").run.name == plain


def test_json_is_read_like_toml(tmp_path: Path, toml: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"bound": {"max_staleness": 2, "groups_per_step": 3}}')
    assert load(path) == load(toml)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("bound.max_stalenes=2", "bound.max_stalenes is not known; did you mean 'max_staleness'?"),
        ("parallel.tp=2", "parallel.tp is not known; did you mean 'tensor_model_parallel_size'?"),
        ("model.scratch.hiden_size=2", "model.scratch.hiden_size is not known; did you mean 'hidden_size'?"),
        ('reward.verifiers=[{name="math", wieght=2}]', "reward.verifiers.0.wieght"),
        ("bound.max_staleness.deep=2", "bound.max_staleness"),
        ("bound=2", "setting bound"),
        ("zzz.x=1", "zzz is not known; use one of algorithm, audit, bound"),
        ("run.steps=many", "run.steps"),
        ("run.steps", "section.key=value"),
    ],
)
def test_a_wrong_override_is_named(override: str, said: str) -> None:
    assert said in refusal(None, override)


def test_an_unknown_key_of_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[rollout]\nlease_seconds = 3\n")
    assert "rollout.lease_seconds is not known; did you mean 'lease_s'?" in refusal(path)


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("TETHER_MAX_STALENES", "did you mean 'TETHER_MAX_STALENESS'?"),
        ("TETHER_LOGLEVEL", "did you mean 'TETHER_LOG_LEVEL'?"),
        ("TETHER_BUND__MAX_STALENESS", "bund is not known; did you mean 'bound'?"),
    ],
)
def test_an_unknown_variable_is_named(variable: str, said: str) -> None:
    assert said in refusal(None, **{variable: "2"})


def test_a_path_through_a_value_is_refused(toml: Path) -> None:
    assert "max_staleness is not a section" in refusal(toml, "bound.max_staleness.deep=2")


@pytest.mark.parametrize(
    ("name", "text"), [("a.toml", "[bound\n"), ("a.json", "{"), ("b.json", "[1]"), ("c.toml", "x = 1\n")]
)
def test_a_file_that_is_not_settings_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert ("x is not known" if name == "c.toml" else name) in refusal(tmp_path / name)


NUMBERS = {
    f"{section}{'.0' * is_array}.{field.name}": limits
    for section, kind, is_array in program("settings_pages").sections()
    for field in dataclasses.fields(kind)
    if (limits := range_of(field.type)) is not None
}
"""Setting -> its range."""


@pytest.mark.parametrize("dotted", sorted(NUMBERS))
def test_load_settings_accepts_the_range_of_a_number_and_nothing_outside(dotted: str) -> None:
    limits = NUMBERS[dotted]
    low = limits.ge if limits.gt is None else limits.gt
    high = limits.le if limits.lt is None else limits.lt
    assert isinstance(low, float | int)
    assert isinstance(high, float | int)
    if limits.ge is not None and ".0." not in dotted:
        shortest = ("bus.heartbeat_s=0.01", "run.steps=1")  # for bus.peer_timeout_s and trainer.publish_every
        load(None, *shortest, f"{dotted}={low}")
    outside = [f"{low - 1}", f"{2 * abs(high) + 1}", "nan", "inf", "-inf"]
    outside += [f"{limit}" for limit in (limits.gt, limits.lt) if limit is not None]
    array, _, field = dotted.partition(".0.")
    for text in outside:
        override = f"{array}=[{{{field}={text}}}]" if field else f"{dotted}={text}"
        assert f"setting {dotted}: " in refusal(None, override)


def test_a_number_outside_its_range_is_named_with_value_and_range() -> None:
    assert refusal(None, "bound.max_staleness=-1") == (
        "setting bound.max_staleness: -1 is not between 0 and 1000"
    )
    assert refusal(None, "bound.drop_share=0") == ("setting bound.drop_share: 0 is not above 0 and at most 1")
    assert "reward.verifiers.0.weight: nan" in refusal(None, "reward.verifiers=[{weight=nan}]")


@pytest.mark.parametrize(
    ("dotted", "hint"),
    [
        ("engine.name", "did you mean 'vllm'?"),
        ("engine.dtype", "use one of bfloat16, float16, float32"),
        ("trainer.backend", "use one of fsdp, megatron, reference, scripted"),
        ("algorithm.name", "use one of cispo, dapo, dr_grpo, grpo"),
        ("weights.transport", "use one of "),
        ("trainer.mismatch_action", "use one of stop, warn"),
        ("trainer.recompute_method", "use one of block, uniform"),
    ],
)
def test_a_name_that_does_not_exist_is_answered_with_those_that_do(dotted: str, hint: str) -> None:
    name = "vlmm" if dotted == "engine.name" else "zzz"
    assert f"setting {dotted}: '{name}' is not known; {hint}" in refusal(None, f"{dotted}={name}")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            ["engine.name=scripted"],
            "engine 'scripted' does not record which experts it chose; use hf, megatron, sglang or vllm",
        ),
        (["engine.name=hf", "trainer.backend=reference"], "backend 'reference' cannot replay routing"),
    ],
)
def test_routing_that_nobody_records_or_replays_is_refused(changes: list[str], problem: str) -> None:
    said = refusal(None, "trainer.routing_replay=true", *changes)
    assert f"setting trainer.routing_replay: {problem}" in said


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["lr_decay_style=linear"], "lr_decay_steps: 0 is not after the warm-up of 0"),
        (["lr_decay_style=cosine", "lr_decay_steps=9", "min_lr=1.0"], "min_lr: 1 is above lr"),
        (["lr_decay_style=WSD", "lr_decay_steps=9"], "lr_wsd_decay_steps: 0 must be between 1 and 9"),
    ],
)
def test_a_schedule_that_never_ends_is_refused(changes: list[str], problem: str) -> None:
    assert f"setting optimizer.{problem}" in refusal(None, *(f"optimizer.{change}" for change in changes))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["critic.path=/models/c"], r"critic\.path: algorithm\.name 'grpo' has no critic; .* use ppo"),
        (["algorithm.name=ppo", "trainer.backend=scripted"], r"trainer\.backend: 'scripted' has no critic"),
        (["algorithm.name=ppo", "critic.critic_warmup_steps=100"], r"100 leaves none of the 100 steps"),
    ],
)
def test_a_critic_that_nobody_trains_is_refused(changes: list[str], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        load_settings(overrides=changes, environ={})


@pytest.mark.parametrize("off", ["trainer.mismatch_limit=0", "trainer.mismatch_share=0", "lora.dropout=0.1"])
def test_a_stop_that_could_never_happen_is_refused(off: str) -> None:
    said = refusal(None, "trainer.mismatch_action=stop", off)
    assert "setting trainer.mismatch_action: 'stop' never stops with" in said
    load(None, "trainer.mismatch_action=warn", off)


def test_two_models_exclude_each_other(tmp_path: Path) -> None:
    assert "exclude each other" in refusal(None, f"model.path='{tmp_path}'", "model.scratch.hidden_size=32")


# -- the file of a run
@pytest.mark.parametrize("config", ["demo.toml", "stragglers.toml"])
def test_the_file_of_a_run_gives_the_same_settings(tmp_path: Path, config: str) -> None:
    settings = load(ROOT / "deploy/configs" / config, f"run.dir='{tmp_path}'", "bound.staleness_policy=drop")
    dump_settings(settings, tmp_path / "settings.json")
    assert load(tmp_path / "settings.json") == settings
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


def test_the_file_of_a_run_names_its_directory_whatever_the_working_directory_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load(None, "run.name=mine")
    dump_settings(settings, tmp_path / "settings.json")
    expected = Path("runs/mine").absolute()
    monkeypatch.chdir(tmp_path)
    assert load(tmp_path / "settings.json").run_dir == expected


def test_the_file_of_a_run_holds_no_url_and_no_password(tmp_path: Path) -> None:
    settings = load(None, TETHER_REDIS_URL="redis://user:secret@host:1/0")
    dump_settings(settings, tmp_path / "settings.json")
    text = (tmp_path / "settings.json").read_text()
    assert "secret" not in text
    assert "redis://" not in text
    assert json.loads(text)["ledger"]["url"] == ""


def test_engines_that_share_a_gpu_can_sleep_and_are_of_one_kind() -> None:
    with pytest.raises(
        SettingsError,
        match=r"setting colocated\.enabled: engine 'scripted' cannot sleep; use hf or megatron or sglang or",
    ):
        load(None, TETHER_COLOCATED__ENABLED="true", TETHER_ENGINE__NAME="scripted")
    with pytest.raises(SettingsError, match=r"colocated\.enabled and services\.pool exclude each other"):
        load(None, TETHER_COLOCATED__ENABLED="true", TETHER_SERVICES__POOL='[{engine = {name = "hf"}}]')


# -- documents
def test_page_of_commands_names_every_section_and_no_other() -> None:
    rows = [
        line.split("|")[1]
        for line in (ROOT / "docs/commands.md").read_text().splitlines()
        if line.startswith("| `[")
    ]
    named = {name for row in rows for name in re.findall(r"\[([a-z_.]+)\]", row)}
    sections = {field.name for field in dataclasses.fields(Settings)}
    others = {"run", "bound"}  # named one by one in the table of variables
    assert sections - others <= named
    assert named <= sections | {"model.scratch", "services.pool", "prompts.mixture", "eval.sets"}
    assert {dotted.split(".")[0] for dotted in SHORT_NAMES.values()} >= others


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (('trainer.recompute_modules=["moe"]',), ("trainer.recompute_modules", "core_attn, layernorm, mlp")),
        (
            ("trainer.backend=reference", "optimizer.cpu_offload=true"),
            ("optimizer.cpu_offload", "'megatron' or 'fsdp'"),
        ),
        (
            ("trainer.backend=scripted", "trainer.recompute_granularity=full"),
            ("trainer.recompute_granularity: full is for trainer.backend 'megatron' or 'fsdp'",),
        ),
        (
            ("trainer.backend=reference", "trainer.dtype=float16"),
            ("trainer.dtype: float16 is for trainer.backend 'megatron'",),
        ),
        (
            ("trainer.dtype=float16", "optimizer.grad_reduce_in_fp32=false"),
            ("optimizer.grad_reduce_in_fp32", "leave it on"),
        ),
    ],
)
def test_memory_is_saved_by_settings_of_megatron_alone(
    overrides: tuple[str, ...], words: tuple[str, ...]
) -> None:
    said = refusal(None, *overrides)
    assert [word for word in words if word not in said] == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("algorithm.name=reinforce_plus_plus",), "'reinforce_plus_plus' does not compare the samples"),
        (("sampling.samples_per_prompt=1",), "with sampling.samples_per_prompt 1 all rewards of a group"),
    ],
)
def test_filtering_of_groups_is_refused_where_equal_rewards_are_a_signal(
    changes: tuple[str, ...], said: str
) -> None:
    assert said in refusal(None, "algorithm.filter_groups=true", *changes)


def test_shaping_needs_a_buffer_below_the_limit() -> None:
    shape = ("algorithm.truncated=shape", "sampling.max_tokens=32")
    for buffer, limit in ((0, 0), (33, 0), (17, 16)):
        problem = refusal(
            None, *shape, f"algorithm.overlong_buffer={buffer}", f"algorithm.overlong_length={limit}"
        )
        assert f"overlong_buffer: {buffer} must be between 1 and {limit or 32}" in problem
    load(None, *shape, "algorithm.overlong_buffer=32")

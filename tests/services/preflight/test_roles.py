"""Tests what is found of teacher, reference and the algorithms that need them, before a run starts."""

import re
import shutil
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from services.preflight.memory import workload_of
from services.preflight.model import read_model
from services.preflight.roles import algorithm_problems, unused_problems
from services.settings.load import load_settings
from services.settings.sections import Settings
from tests.services.preflight.test_check import demo, found, model_in, with_model
from tests.trainer.classifiers import save_classifier
from trainer.config import ScratchConfig
from trainer.random_model import build_scratch

VOCABULARY = "0123456789= "
"""That of the demo's model."""
SCORES_TURNS = "tests.services.preflight.test_check:score_turns"
BY_TURN = f'reward.verifiers=[{{name="function", options={{path="{SCORES_TURNS}"}}}}]'
DISTILLS = 'algorithm.name="on_policy_distillation"'
SHAPE = 'algorithm.truncated="shape"'
DECAY = 'optimizer.lr_decay_style="linear"'


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another family and size, the demo's tokens."""
    config = ScratchConfig(architecture="llama", hidden_size=32, num_hidden_layers=1, vocabulary=VOCABULARY)
    return build_scratch(config, tmp_path_factory.mktemp("teacher") / "model")


def test_a_teacher_of_the_same_tokens_is_accepted_and_named(teacher: Path, tmp_path: Path) -> None:
    settings = demo(tmp_path / "run", DISTILLS, f'teacher.path="{teacher}"')
    assert found(settings) == []
    with_other = demo(tmp_path / "run", "algorithm.kl_coef=0.1", f'reference.path="{teacher}"')
    assert found(with_other) == []


@pytest.fixture(scope="module")
def classifier(teacher: Path) -> Path:
    """A reward model of the demo's tokens."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        made = save_classifier(teacher, teacher.parent / "classifier")
        (made / name).write_bytes((teacher / name).read_bytes())
    return made


def test_a_reward_model_is_accepted_and_counted(classifier: Path, tmp_path: Path) -> None:
    for more in ("algorithm.name=ppo", "trainer.backend=fsdp", "placement.reward_model=1"):
        assert found(demo(tmp_path / "run", f'reward_model.path="{classifier}"', more)) == []
    settings = demo(tmp_path / "run", f'reward_model.path="{classifier}"')
    (shape,) = workload_of(settings, read_model(settings)).frozen
    assert shape.architecture.value_head


def test_a_reward_model_has_positions_for_the_longest_row_and_one_token(
    classifier: Path, tmp_path: Path
) -> None:
    given = (f'reward_model.path="{classifier}"', "model.scratch.max_position_embeddings=256")
    assert found(demo(tmp_path / "run", *given, "engine.max_model_len=255")) == []
    (problem,) = found(demo(tmp_path / "run", *given, "engine.max_model_len=256"))
    assert "has 256 positions, and a row has up to 256 tokens (engine.max_model_len) with one more" in problem
    assert problem.endswith("lower engine.max_model_len to 255")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (('reward_model.path="TEACHER"',), "setting reward_model.path: .* is LlamaForCausalLM with 2 label"),
        (('reward_model.path="HEADLESS"',), "setting reward_model.path: no tensor of the .* is score.weight"),
        (('reward_model.path="SCORES"', DISTILLS, 'teacher.path="TEACHER"'), "learns nothing from rewards"),
        (("placement.reward_model=1",), "there is no reward model without reward_model.path"),
        (('reward_model.path="SCORES"', BY_TURN), "scores whole samples, and a verifier scores turns"),
    ],
)
def test_settings_beside_a_reward_model_are_refused(
    overrides: tuple[str, ...], words: str, teacher: Path, classifier: Path, tmp_path: Path
) -> None:
    shutil.copytree(classifier, tmp_path / "headless")
    shutil.copy(teacher / "model.safetensors", tmp_path / "headless/model.safetensors")
    paths = {"TEACHER": teacher, "SCORES": classifier, "HEADLESS": tmp_path / "headless"}
    given = [re.sub("|".join(paths), lambda name: str(paths[name[0]]), override) for override in overrides]
    problems = found(demo(tmp_path / "run", *given))
    assert any(re.search(words, problem) for problem in problems), problems


def test_groups_are_not_filtered_before_the_trainer_scores_them(classifier: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"algorithm\.filter_groups: groups are filtered before"):
        demo(tmp_path / "run", f'reward_model.path="{classifier}"', "algorithm.filter_groups=true")


def test_another_vocabulary_is_refused_with_both_values(tmp_path: Path) -> None:
    build_scratch(ScratchConfig(vocabulary="0123456789="), tmp_path / "fewer")
    few = found(demo(tmp_path / "run", DISTILLS, f'teacher.path="{tmp_path / "fewer"}"'))
    assert any("its vocab_size is 13, that of the policy 14" in problem for problem in few)
    build_scratch(ScratchConfig(vocabulary="0123456789+= "), tmp_path / "other")
    (problem,) = found(demo(tmp_path / "run", DISTILLS, f'teacher.path="{tmp_path / "other"}"'))
    assert "its tokenizer has 15 tokens, that of the policy 14" in problem
    assert "token 12 is '+' there and '=' here" in problem


def test_more_rows_than_tokens_are_padding(tmp_path: Path) -> None:
    """Families pad their vocabularies to other sizes; the tokens count."""
    own = model_in(tmp_path / "own", vocab_size=13)
    model_in(tmp_path / "padded", vocab_size=64)
    settings = with_model(
        tmp_path / "run", own, 'trainer.backend="reference"', 'engine.name="hf"', DISTILLS,
        f'teacher.path="{tmp_path / "padded"}"',
    )  # fmt: skip
    assert [problem for problem in found(settings) if "teacher" in problem] == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((DISTILLS,), "there is no teacher; set teacher.path"),
        (('teacher.path="TEACHER"',), "algorithm.name 'grpo' has no teacher"),
        (("placement.teacher=1",), "there is no teacher without teacher.path"),
        (("placement.critic=1",), "algorithm.name 'grpo' has no critic; remove the setting, or use ppo"),
        (
            ("placement.critic=5", "placement.critic_tensor_parallel_size=5", "algorithm.name=ppo"),
            "the critic: placement.critic: ",
        ),
        (("placement.reference=1",), "there is no reference model with algorithm.kl_coef = 0"),
        (
            ("placement.reference=5", "placement.reference_tensor_parallel_size=5", "algorithm.kl_coef=0.1"),
            "placement.reference with ",
        ),
        (('reference.path="TEACHER"',), "nothing uses a reference model with algorithm.kl_coef = 0"),
        ((DISTILLS, 'teacher.path="nowhere"'), "setting teacher.path: no config.json in"),
        ((DISTILLS, 'teacher.path="TEACHER"', 'teacher.revision="main"'), "setting teacher.revision"),
        (("algorithm.name=ppo", 'critic.revision="main"'), "setting critic.revision"),
        ((DISTILLS, 'teacher.path="TEACHER"', "algorithm.opd_kl_coef=0"), "algorithm.opd_kl_coef"),
        ((DISTILLS, 'teacher.path="TEACHER"', 'trainer.backend="scripted"'), "has no models"),
        (("algorithm.use_kl_in_reward=true",), "it does nothing with algorithm.kl_coef = 0"),
        (('algorithm.name="sft"',), "they go together"),
        (('environment.name="given"',), "they go together"),
    ],
)
def test_incompatible_roles_are_refused(
    overrides: tuple[str, ...], words: str, teacher: Path, tmp_path: Path
) -> None:
    given = [override.replace("TEACHER", str(teacher)) for override in overrides]
    problems = found(demo(tmp_path / "run", *given))
    assert any(words in problem for problem in problems), problems


def test_training_on_data_refuses_what_it_does_not_use(tmp_path: Path) -> None:
    def problems(*overrides: str) -> list[str]:
        base = ('algorithm.name="sft"', 'environment.name="given"', "sampling.samples_per_prompt=1")
        settings: Settings = demo(tmp_path / "run", *base, *overrides)
        return [problem.setting for problem in algorithm_problems(settings)]

    assert problems() == []
    wrong = {
        "sampling.samples_per_prompt": "8",
        "sampling.temperature": "0.7",
        "algorithm.kl_coef": "0.1",
        "algorithm.entropy_coef": "0.1",
        "algorithm.rejection_level": '"token"',
        "trainer.recompute_logprobs": "true",
        "algorithm.ess_scaling": '"sqrt"',
        "algorithm.entropy_target": "0.1",
    }
    for setting, value in wrong.items():
        assert setting in problems(f"{setting}={value}")


def test_memory_is_expected_for_what_is_there(teacher: Path, tmp_path: Path) -> None:
    def workload(*overrides: str) -> tuple[bool, list[bool]]:
        settings = demo(tmp_path / "run", *overrides)
        work = workload_of(settings, read_model(settings))
        return work.reference, [shape.offload for shape in work.frozen]

    near, path = "algorithm.kl_coef=0.1", f'reference.path="{teacher}"'
    assert workload() == (False, [])
    assert workload(near) == (True, [])
    assert workload(near, "lora.rank=4") == (False, [])
    assert workload(near, path) == (False, [False])
    assert workload(near, path, "reference.offload=true") == (False, [True])


def test_a_frozen_path_of_a_file_is_relative_to_that_file(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    config = tmp_path / "here/run.toml"
    config.write_text('[teacher]\npath = "../teacher"\n')
    assert load_settings(str(config), [], environ={}).teacher.path == str(tmp_path / "teacher")


@pytest.mark.parametrize(
    ("override", "switch"),
    [
        ('lora.target_modules=["q_proj"]', "lora.rank=2"),
        ("lora.alpha=8", "lora.rank=2"),
        ("lora.use_rslora=true", "lora.rank=2"),
        ("lora.dropout=0.1", "lora.rank=2"),
        ('lora.path="/adapter"', "lora.rank=2"),
        ("critic.lr=1e-4", "algorithm.name=ppo"),
        ("critic.clip_grad=2", "algorithm.name=ppo"),
        ("optimizer.lr_decay_steps=9", DECAY),
        ("optimizer.min_lr=1e-6", f"{DECAY} optimizer.lr_decay_steps=9"),
        (
            "optimizer.lr_wsd_decay_steps=4",
            'optimizer.lr_decay_style="WSD" optimizer.lr_decay_steps=9',
        ),
        ("algorithm.overlong_buffer=1", SHAPE),
        ("algorithm.overlong_length=8", f"{SHAPE} algorithm.overlong_buffer=1"),
        ("algorithm.overlong_penalty=2", f"{SHAPE} algorithm.overlong_buffer=1"),
        ("algorithm.gamma=0.9", "algorithm.name=ppo"),
        ("algorithm.gae_lambda=0.9", "algorithm.name=ppo"),
        ("algorithm.whiten_advantages=false", "algorithm.name=ppo"),
        ("algorithm.length_normalizer=9", "algorithm.name=dr_grpo"),
        ("algorithm.rejection_low=0.1", 'algorithm.rejection_level="token"'),
        ("algorithm.rejection_high=3", 'algorithm.rejection_level="token"'),
        ("algorithm.max_filtered_batches=3", "algorithm.filter_groups=true"),
        ("algorithm.entropy_coef_delta=0.1", "algorithm.entropy_target=0.1"),
        ("algorithm.entropy_coef_max=0.1", "algorithm.entropy_target=0.1"),
    ],
)
def test_a_setting_is_refused_unless_its_switch_is_on(tmp_path: Path, override: str, switch: str) -> None:
    (problem,) = unused_problems(demo(tmp_path / "run", override))
    assert problem.setting == override.partition("=")[0]
    assert problem.remedy.endswith(", or remove the setting")
    assert [*unused_problems(demo(tmp_path / "run", override, *switch.split()))] == []


def test_check_run_names_each_field_of_adapters_without_a_rank(tmp_path: Path) -> None:
    given = ("lora.alpha=8", 'lora.target_modules=["q_proj"]')
    because = "it changes nothing, because lora.rank is 0; set lora.rank, or remove the setting"
    assert found(demo(tmp_path / "run", *given)) == [
        f"setting lora.alpha = 8.0: {because}",
        f"setting lora.target_modules = ['q_proj']: {because}",
    ]


def test_own_code_may_read_every_setting(tmp_path: Path) -> None:
    own = ('algorithm.name="mine:Loss"', 'optimizer.lr_decay_style="mine:rate"')
    read = ("algorithm.gamma=0.9", "algorithm.rejection_low=0.1", "algorithm.length_normalizer=9")
    rate = ("optimizer.min_lr=1e-6", "optimizer.lr_decay_steps=9", "optimizer.lr_wsd_decay_steps=4")
    assert [*unused_problems(demo(tmp_path / "run", *own, *read, *rate))] == []

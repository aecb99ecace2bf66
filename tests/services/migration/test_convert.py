"""Tests `tether import-config`: three forms of settings, what is carried over, listed or refused."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SettingsError
from services.migration.convert import convert
from services.migration.maps import CONVERSIONS
from services.migration.sources import read
from services.settings.load import compose_settings
from tests.docs.pages import DOCS
from tests.integration.command import tether_here

TRL = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: trl-lib/DeepMath-103K
num_generations: 8
generation_batch_size: 256
max_completion_length: 1024
learning_rate: 1e-6
epsilon: 0.2
epsilon_high: 0.28
loss_type: dr_grpo
beta: 0.001
max_steps: 300
save_steps: 50
mask_truncated_completions: true
per_device_train_batch_size: 8
report_to: wandb
"""
VERL = r"""
set -x
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=/data/gsm8k/train.parquet \
    data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024 \
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.optim.betas=[0.9,0.98] \
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \
    trainer.save_freq=-1 trainer.logger='["console","wandb"]'
"""
SLIME = r"""
ROLLOUT_ARGS=(
   --hf-checkpoint /models/GLM-Z1-9B-0414
   # JSONL
   --prompt-data /data/dapo-math-17k.jsonl
   --input-key prompt --label-key label --apply-chat-template
   --num-rollout 3000 --rollout-batch-size 16 --n-samples-per-prompt 8 --global-batch-size 128
   --rollout-max-response-len 8192
)
GRPO_ARGS=( --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28 )
PERF_ARGS+=( --tensor-model-parallel-size 2 --sequence-parallel --eval-prompt-data aime /data/aime.jsonl )
"""


HOSTILE = r'"data.x\n[run]\nmodules = [\"evil\"]\n#"'
"""A name in YAML that would begin a section of the result."""


def converted(text: str, place: Path) -> tuple[dict[str, Any], str]:
    (place / "given").write_text(text)
    result = convert(place / "given")
    (place / "config.toml").write_text(result)
    compose_settings(str(place / "config.toml"), environ={})  # every name and value is known
    return tomllib.loads(result), result


def test_yaml_of_trl_becomes_settings(tmp_path: Path) -> None:
    settings, text = converted(TRL, tmp_path)
    assert settings["model"] == {"path": "Qwen/Qwen3-0.6B"}
    assert settings["prompts"] == {"path": "trl-lib/DeepMath-103K", "source": "hf"}
    assert settings["bound"] == {"max_staleness": 0, "groups_per_step": 32}
    assert settings["algorithm"] == {
        "name": "dr_grpo", "kl_coef": 0.001, "clip_low": 0.2, "clip_high": 0.28, "truncated": "mask",
        "length_normalizer": 1024,
    }  # fmt: skip
    assert settings["optimizer"]["lr"] == 1e-6
    assert "#   per_device_train_batch_size: set bound.groups_per_step" in text
    assert "#   report_to: see [tracking]" in text


@pytest.mark.parametrize(
    "name",
    ["optim", "push_to_hub", "hub_model_id", "trust_remote_code", "deepspeed", "importance_sampling_level",
     "model_init_kwargs", "chat_template_kwargs", "num_generations_eval", "repetition_penalty", "min_p",
     "disable_dropout", "sync_ref_model", "dataloader_num_workers", "fsdp_config", "eval_delay"],
)  # fmt: skip
def test_name_of_trl_without_a_counterpart_is_listed(tmp_path: Path, name: str) -> None:
    settings, text = converted(f"{TRL}{name}: 1\n", tmp_path)
    assert settings == converted(TRL, tmp_path)[0]
    assert f"#   {name}: " in text


@pytest.mark.parametrize(
    ("lines", "every"),
    [("eval_strategy: steps\neval_steps: 10\n", 10), ("eval_strategy: no\neval_steps: 10\n", None),
     ("eval_strategy: epoch\neval_steps: 10\n", None), ("eval_steps: 10\n", None),
     ("eval_strategy: steps\n", None)],
)  # fmt: skip
def test_evaluations_of_trl_are_carried_over_if_they_are_on(
    tmp_path: Path, lines: str, every: int | None
) -> None:
    settings, text = converted(TRL + lines, tmp_path)
    assert settings.get("eval", {}).get("every") == every
    assert ("eval_steps: eval_strategy is not `steps` there" in text) == ("eval_steps" in lines and not every)


def test_overrides_of_verl_become_settings(tmp_path: Path) -> None:
    settings, text = converted(VERL, tmp_path)
    assert settings["bound"]["groups_per_step"] == 1024
    assert settings["trainer"] == {"num_mini_batches": 4}
    assert settings["engine"] == {"name": "vllm", "max_model_len": 1536}
    assert settings["optimizer"] == {"adam_beta1": 0.9, "adam_beta2": 0.98}
    assert settings["algorithm"] == {"name": "grpo"}, "its KL loss is off"
    assert "#   trainer.logger: " in text


@pytest.mark.parametrize(("rank", "lora"), [(0, None), (8, {"rank": 8, "alpha": 64.0})])
def test_alpha_of_verl_counts_with_adapters_alone(
    tmp_path: Path, rank: int, lora: dict[str, Any] | None
) -> None:
    settings, _ = converted(
        f"actor_rollout_ref: {{model: {{lora_rank: {rank}, lora_alpha: 64}}}}\n", tmp_path
    )
    assert settings.get("lora") == lora


def test_tree_of_verl_is_read_as_its_overrides(tmp_path: Path) -> None:
    tree = "actor_rollout_ref:\n  rollout: {n: 5, temperature: 0.9}\n  actor: {optim: {lr: 1e-6}}\n"
    settings, _ = converted(tree, tmp_path)
    assert settings["sampling"] == {"samples_per_prompt": 5, "temperature": 0.9}
    assert settings["optimizer"] == {"lr": 1e-6}


def test_tree_of_verl_may_have_an_apostrophe_and_a_list_of_one_file(tmp_path: Path) -> None:
    tree = "# the model's name\nactor_rollout_ref: {model: {path: m}}\ndata: {train_files: [a.jsonl]}\n"
    settings, _ = converted(tree, tmp_path)
    assert settings["model"] == {"path": "m"}
    assert settings["prompts"] == {"path": "a.jsonl", "source": "jsonl"}


def test_null_is_no_value(tmp_path: Path) -> None:
    settings, text = converted("seed: 3\nmodel_revision: null\nmax_steps: ~\n", tmp_path)
    assert settings == {"bound": {"max_staleness": 0}, "trainer": {"seed": 3}, "prompts": {"seed": 3}}
    assert "#   model_revision: null there" in text
    settings, _ = converted(VERL.replace("Qwen/Qwen3-8B", "null"), tmp_path)
    assert "model" not in settings


@pytest.mark.parametrize(
    ("actor", "coefficient", "note"),
    [
        ("use_kl_loss: true, kl_loss_coef: 0.001", 0.001, ""),
        ("kl_loss_coef: 0.001", None, "the coefficient of the KL loss: the loss is off there"),
        ("use_kl_loss: true", None, "on without a coefficient: set algorithm.kl_coef"),
    ],
)
def test_coefficient_of_verls_kl_loss_is_carried_where_that_is_on(
    actor: str, coefficient: float | None, note: str, tmp_path: Path
) -> None:
    settings, text = converted(f"actor_rollout_ref: {{actor: {{{actor}}}}}\n", tmp_path)
    assert settings.get("algorithm", {}).get("kl_coef") == coefficient
    assert note in text


def test_coefficient_of_slimes_kl_loss_is_carried_where_that_is_on(tmp_path: Path) -> None:
    given = SLIME.replace("coef 0.00", "coef 0.01")
    assert converted(given, tmp_path)[0]["algorithm"]["kl_coef"] == 0.01
    assert "kl_coef" not in converted(given.replace("--use-kl-loss", ""), tmp_path)[0]["algorithm"]


def test_number_that_is_off_below_zero_leaves_the_default(tmp_path: Path) -> None:
    settings, text = converted("max_steps: -1\ntop_k: -1\n", tmp_path)
    assert settings == {"bound": {"max_staleness": 0}, "sampling": {"top_k": 0}}
    assert "#   max_steps: off there; tether's default holds" in text


def test_text_of_any_characters_is_carried_over(tmp_path: Path) -> None:
    settings, _ = converted("model_name_or_path: 'a\U0001f600'\n", tmp_path)
    assert settings["model"] == {"path": "a\U0001f600"}


def test_rank_of_lora_is_carried_where_it_is_above_zero(tmp_path: Path) -> None:
    model = "actor_rollout_ref: {model: {lora_rank: 32, lora_alpha: 64, target_modules: all-linear}}\n"
    settings, text = converted(model, tmp_path)
    assert settings["lora"] == {"rank": 32, "alpha": 64.0}
    assert "#   actor_rollout_ref.model.target_modules: see [lora]" in text
    assert "lora" not in converted("actor_rollout_ref: {model: {lora_rank: 0}}\n", tmp_path)[0]


def test_averages_and_estimators_of_verl_are_listed_with_what_decides_them_here(tmp_path: Path) -> None:
    actor = "actor_rollout_ref: {actor: {loss_agg_mode: token-mean, kl_loss_type: low_var_kl}}\n"
    text = converted(actor, tmp_path)[1]
    assert "#   actor_rollout_ref.actor.loss_agg_mode: the algorithm decides" in text
    assert "#   actor_rollout_ref.actor.kl_loss_type: set algorithm.kl_estimator" in text


def test_name_of_the_file_stays_within_its_comment(tmp_path: Path) -> None:
    hostile = tmp_path / "a\n[run]\nmodules = ['evil']\n#"
    hostile.write_text("seed: 1\n")
    assert "run" not in tomllib.loads(convert(hostile))


def test_arguments_of_slimes_script_are_those_of_its_program(tmp_path: Path) -> None:
    around = (
        "ray start --head --num-gpus 8 --dashboard-host=0.0.0.0\n",
        'ray job submit --address="http://127.0.0.1:8265" \\\n  -- python3 train.py --colocate \\\n'
        "  --lr=2e-6 ${GRPO_ARGS[@]} 2>&1 | tee log.txt\n",
    )
    settings = converted(around[0] + SLIME + around[1], tmp_path)[0]
    assert settings == converted(SLIME + "ARGS=(--lr 2e-6)", tmp_path)[0]


@pytest.mark.parametrize("around", ["{}", "python3 train.py {} 2>&1 | tee log", "A=(\n  {}  # note's\n)\n"])
def test_quotes_keep_what_ends_an_argument_elsewhere(around: str) -> None:
    given = (
        r"""--hf-checkpoint "/m (new)" --rollout-stop "Answer: #### " ")" --label 'x & y' --eval a#b "\"; """
        r"""" --colocate --load $(dirname $(pwd -P))/x --empty '' """
    )
    assert read(around.format(given), "slime") == {
        "hf-checkpoint": "/m (new)", "rollout-stop": ["Answer: #### ", ")"], "label": "x & y",
        "eval": ["a#b", '"; '], "colocate": True, "load": "$(dirname $(pwd -P))/x", "empty": "",
    }  # fmt: skip


def test_overrides_of_verl_stand_in_lists_and_quotes() -> None:
    script = "# it's\nDATA=(data.x='a # b'\n data.y=1)\npython -m verl \"${DATA[@]}\" 'data.z=\"c\"'&\n"
    assert read(script, "verl") == {"data.x": "a # b", "data.y": "1", "data.z": '"c"'}


def test_arguments_of_slime_become_settings(tmp_path: Path) -> None:
    settings, text = converted(SLIME, tmp_path)
    assert settings["prompts"] == {
        "path": "/data/dapo-math-17k.jsonl", "prompt_field": "prompt", "answer_field": "label",
        "source": "jsonl",
    }  # fmt: skip
    assert settings["run"] == {"steps": 3000}
    assert settings["parallel"] == {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert settings["algorithm"]["clip_high"] == 0.28
    assert "#   global-batch-size: " in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TRL + "num_generation: 4\nfrob: 1\n", "num_generation, did you mean num_generations?; frob"),
        (TRL.replace("dr_grpo", "sapo"), "sapo is not carried over; known are grpo, dr_grpo, dapo"),
        (TRL.replace("256", "250"), "generation_batch_size = 250 is not a multiple of num_generations = 8"),
        (TRL.replace("300", "many"), "max_steps = 'many'"),
        (VERL.replace("=256", "=100"), "1024 is not a multiple of ppo_mini_batch_size = 100"),
        (VERL.replace("/data/", "$HOME/"), "data.train_files is $HOME/gsm8k/train.parquet: write the"),
        (SLIME + "ARGS=(--eps-clop 1)", "eps-clop, did you mean eps-clip?"),
        (SLIME + "ARGS=(--eps-clip '1)", "line 12 opens a ' without end"),
        ("- a\n- b\n", "no mapping"),
        ("a: [", "not YAML"),
        (f"actor_rollout_ref: {{}}\n{HOSTILE}: 1\n", "has characters that cannot be printed"),
        ("seed: 1\n1: 2\n", "the name 1 is not text"),
        ("actor_rollout_ref: {null: 2}\n", "the name None is not text"),
        ("a: 2026-13-45\n", "not YAML"),
        pytest.param("a: " + "[" * 5000, "not YAML", id="nested"),
        ("actor_rollout_ref: {model: {a: b}}\ndata: {train_files: [a, b]}\n", "2 files are not carried over"),
        (VERL.replace("/data/gsm8k/train.parquet", "\"['a','b']\""), "2 files are not carried over"),
        (SLIME.replace("17k.jsonl", "17k.jsonl b.jsonl"), "2 files are not carried over"),
        ("model_name_or_path: [a]\n", "one text is carried over, not a list"),
        ("num_generations: .inf\n", "num_generations = inf: inf is not a finite number"),
        ("learning_rate: .nan\n", "learning_rate = nan: nan is not a finite number"),
        pytest.param(f"learning_rate: {10**400}\n", "int too large to convert to float", id="long"),
        ("beta: true\n", "beta = True: True is not a finite number"),
        (SLIME + "ARGS=(--lr)", "lr = True: True is not a finite number"),
        ("actor_rollout_ref: &a {x: *a}\n", "a value contains itself"),
    ],
)  # fmt: skip
def test_names_and_values_without_a_counterpart_are_refused_by_name(
    text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "given").write_text(text)
    with pytest.raises(SettingsError) as refused:
        convert(tmp_path / "given")
    assert str(refused.value).startswith(f"{tmp_path / 'given'}: ")
    assert message in str(refused.value)


def test_page_has_every_name_that_is_carried_over() -> None:
    page = (DOCS / "migrating.md").read_text()
    dashes = {"slime": "--"}
    missing = [
        name
        for source, carried in CONVERSIONS.items()
        for name in carried
        if f"`{dashes.get(source, '')}{name}`" not in page
    ]
    assert missing == []


def test_command_prints_the_settings_or_ends_with_two(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text(TRL)
    done = tether_here("import-config", tmp_path / "grpo.yaml")
    assert done.returncode == 0
    assert tomllib.loads(done.stdout)["run"] == {"steps": 300}
    done = tether_here("import-config", tmp_path / "none.yaml")
    assert done.returncode == 2
    assert done.stderr == f"tether: {tmp_path / 'none.yaml'} cannot be read: No such file or directory\n"

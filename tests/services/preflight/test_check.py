"""Tests what is found before a run starts: each problem by setting, value and remedy, and all at once."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from protocol.errors import SettingsError
from services.bus.curve import create_keys
from services.preflight.check import check_run, describe_run
from services.prepare import prepare
from services.settings.load import load_settings
from services.settings.sections import Settings
from tests.integration.loop import ROOT
from tests.services.preflight import number_reward

PROMPTS = [{"prompt": f"{i}=", "answer": str(i)} for i in range(10)]
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 13,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip

WINDOWS_REFUSED = "vLLM has no qwen"
ALTERNATING = ["full_attention", "sliding_attention", "full_attention"]
HALF = '{name="positions"}, {name="exact_match", label="half", weight=0.5}'
JUDGE = '{url="http://127.0.0.1:9/v1",model="m",prompt="{response} {answer} {rubric}"}'
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def demo(run_dir: Path, *overrides: str) -> Settings:
    """The demo with ten prompts of its own, all of them trained on."""
    path = run_dir.parent / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    own = (f'prompts.path="{path}"', "prompts.held_out=0", "eval.at_end=false", f'run.dir="{run_dir}"')
    return load_settings(str(ROOT / "deploy/configs/demo.toml"), [*own, *overrides], environ={})


def found(settings: Settings, *, local: bool = False) -> list[str]:
    return [str(problem) for problem in check_run(settings, local=local).problems]


def model_in(directory: Path, **changes: Any) -> str:
    """A model directory with a tokenizer, as an override; fields that are None are left out."""
    from trainer.config import ScratchConfig
    from trainer.random_model import write_tokenizer

    directory.mkdir()
    config = {name: value for name, value in {**QWEN2, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    write_tokenizer(ScratchConfig(vocabulary="0123456789= "), directory)
    return f'model={{path="{directory}"}}'


def with_model(run_dir: Path, model: str, *overrides: str) -> Settings:
    """The demo on another model, which takes the place of [model.scratch]."""
    text = (ROOT / "deploy/configs/demo.toml").read_text()
    head, _, rest = text.partition("[model.scratch]")
    config = run_dir.parent / "other.toml"
    config.write_text(f"{head}[prompts]{rest.partition('[prompts]')[2]}")
    path = run_dir.parent / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    own = (f'prompts.path="{path}"', "prompts.held_out=0", f'run.dir="{run_dir}"', model)
    return load_settings(str(config), [*own, *overrides], environ={})


def score_turns(*, turns: list[str]) -> list[float]:
    """A verifier that scores turns."""
    return [0.0 for _ in turns]


def test_check_run_finds_nothing_in_the_demo_and_describes_it(tmp_path: Path) -> None:
    settings = demo(tmp_path / "run")
    findings = check_run(settings)
    assert findings.problems == ()
    assert findings.model is not None
    assert findings.source is not None
    text = "\n".join(describe_run(settings, findings.model, findings.source))
    assert "qwen2, 234,368 parameters, made at the start" in text
    assert 'first    "' in text
    assert "60 of 32 prompts x 8 samples, at most 256 sampled tokens each; E=1, mask" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("guess_number", "x 8 samples, at most 1 sampled tokens each turn; E=1"),
        ("given", "x 8 samples; E=1"),
    ],
)
def test_the_tokens_of_a_step_are_said_of_single_turns_alone(tmp_path: Path, name: str, words: str) -> None:
    settings = demo(tmp_path / "run", f"environment.name={name}")
    findings = check_run(settings)
    assert findings.model is not None
    assert findings.source is not None
    assert words in "\n".join(describe_run(settings, findings.model, findings.source))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sampling.top_p=0.6"], ["setting sampling.top_p = 0.6", "set it to 1"]),
        (["sampling.samples_per_prompt=1"], ["setting sampling.samples_per_prompt = 1", "set it to 2"]),
        (
            ["render.max_prompt_tokens=60", "sampling.max_tokens=10"],
            ["setting render.max_prompt_tokens = 60", "engine.max_model_len = 64", "set it to 54 or less"],
        ),
        (["sampling.max_tokens=64"], ["setting sampling.max_tokens = 64", "set it to 63 or less"]),
        (["engine.max_model_len=65"], ["max_model_len 65 exceeds the 64 positions"]),
        (
            ["prompts.passes=2", "bound.groups_per_step=11"],
            ["setting bound.groups_per_step = 11", "10 prompts", "set it to 10 or less"],
        ),
        (
            ["parallel.tensor_model_parallel_size=3"],
            ["setting parallel.tensor_model_parallel_size = 3", "4 attention heads", "divisor"],
        ),
        (["parallel.pipeline_model_parallel_size=4"], ["pipeline_model_parallel_size = 4", "2 layers"]),
        (
            [
                "parallel.pipeline_model_parallel_size=2",
                "parallel.virtual_pipeline_model_parallel_size=2",
            ],
            ["virtual_pipeline_model_parallel_size = 2", "1 layers of pipeline stage 0", "divisor"],
        ),
        (
            ["trainer.backend=reference", "parallel.data_parallel_size=2"],
            ["setting trainer.backend = 'reference'", "one rank", "use megatron"],
        ),
        (["engine.tensor_parallel_size=3"], ["tensor_parallel_size 3 does not divide"]),
        (
            ['reward.verifiers=[{name="python_tests"}]'],
            ["setting reward.verifiers = 'python_tests'", "'tests'", "have answer"],
        ),
        (['reward.verifiers=[{name="exact_mach"}]'], ["did you mean 'exact_match'"]),
        (
            ['reward.verifiers=[{name="own.module:score"}]'],
            ["'own.module:score' is not a module", "options = { path = "],
        ),
        (
            [f'reward.verifiers=[{{name="judge",options={JUDGE}}}]'],
            ["setting reward.verifiers = 'judge'", "'rubric'", "have answer"],
        ),
        (
            ['reward.verifiers=[{name="exact_match",fallback="math"}]'],
            ["setting reward.verifiers: exact_match: there is no verifier 'math' to fall back to"],
        ),
        (
            [
                f'reward.verifiers=[{{name="function",options={{path="{__name__}:score_turns"}}}}]',
                "algorithm.use_kl_in_reward=true",
                "algorithm.kl_coef=0.1",
            ],
            ["setting algorithm.use_kl_in_reward: ", "a verifier scores turns", "instead of grpo"],
        ),
        (['environment.name="multi_turn"'], ["setting environment.name", "not known"]),
        (
            [
                'environment.name="agent"',
                'engine.python="/nothing/python"',
                'environment.options={function="tests.rollout.environments.agents:plays",tool_syntax="sglang:x"}',
            ],
            ["the parsers of sglang cannot be started", "/nothing/python"],
        ),
        (["render.max_prompt_tokens=1", 'render.suffix="00"'], ["all of the first 16 prompts are too long"]),
        (['prompts.path="/nowhere.jsonl"'], ["/nowhere.jsonl"]),
        (['model.scratch.vocabulary="00"'], ["vocabulary"]),
        (
            ['model.scratch.vocabulary="023456789="'],
            ["setting model.scratch.vocabulary", "has characters outside it", "'1'"],
        ),
    ],
)
def test_check_run_names_the_problem_and_the_remedy(
    tmp_path: Path, overrides: list[str], words: list[str]
) -> None:
    (text,) = found(demo(tmp_path / "run", *overrides))
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("changes", "overrides", "words"),
    [
        ({}, [], None),
        ({"model_type": "gpt2"}, [], "model_type 'gpt2' is not supported"),
        (
            {"model_type": "phi3"},
            ["weights.transport=shared", "engine.name=megatron"],
            "setting weights.transport = 'shared': the trainer interleaves q, k and v",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2},
            ["parallel.tensor_model_parallel_size=2"],
            "a model with experts on 2 tensor ranks needs it: set it to true",
        ),
        ({"attention_bias": True}, [], "attention_bias = True is not supported"),
        (
            {"model_type": "phi3", "original_max_position_embeddings": 32, "rope_scaling": LONGROPE},
            ["engine.max_model_len=64"],
            "longrope rotates otherwise beyond 32 tokens",
        ),
        ({"use_sliding_window": True, "max_window_layers": 1}, [], WINDOWS_REFUSED),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ALTERNATING,
            },
            [],
            WINDOWS_REFUSED,
        ),
        ({"use_sliding_window": True, "max_window_layers": 1}, ["engine.name=megatron"], None),
        ({"use_sliding_window": True, "max_window_layers": 0}, [], None),
        ({"use_sliding_window": False, "max_window_layers": 1}, [], None),
        ({"model_type": "phi"}, ["trainer.backend=reference"], "'vllm' cannot serve the phi in"),
        ({"rms_norm_eps": None}, [], "config.json lacks what a model needs: rms_norm_eps"),
        ({"hidden_size": "wide"}, [], "config.json: hidden_size = 'wide' must be a number"),
        ({"vocab_size": 1}, [], "stop token 1 is outside the model's vocabulary of 1 tokens"),
        (
            {"model_type": "marvel", "architectures": ["MarvelForCausalLM"]},
            ["trainer.backend=reference", "engine.name=hf"],
            "is not a causal language model",
        ),
    ],
)
def test_check_run_reads_what_the_model_allows(
    tmp_path: Path, changes: dict[str, Any], overrides: list[str], words: str | None
) -> None:
    override = model_in(tmp_path / "model", **changes)
    problems = found(with_model(tmp_path / "run", override, *overrides))
    assert problems == [] if words is None else words in problems[0], problems


def test_check_run_finds_all_problems_and_prepare_makes_nothing(tmp_path: Path) -> None:
    settings = demo(
        tmp_path / "run",
        "sampling.top_k=3",
        "sampling.samples_per_prompt=1",
        "parallel.tensor_model_parallel_size=3",
        'reward.verifiers=[{name="python_tests"}]',
    )
    assert len(found(settings)) == 4
    with pytest.raises(SettingsError, match=r"sampling\.top_k = 3.*\(3 more: `tether check` lists all\)"):
        prepare(settings)
    assert not (tmp_path / "run").exists()


def test_check_run_names_the_ports_keys_and_libraries_of_this_machine(tmp_path: Path) -> None:
    create_keys(tmp_path / "keys")
    (tmp_path / "keys/authorized/client.key").unlink()
    settings = demo(
        tmp_path / "run", "engine.name=hf", "bus.port_base=47000", "monitor.port=47001",
        f'bus.curve_dir="{tmp_path}/keys"',
    )  # fmt: skip
    assert found(settings) == []
    problems = found(settings, local=True)
    assert any("setting monitor.port = 47001: the bus has the ports 47000 to" in text for text in problems)
    assert any("authorized holds no public key" in text for text in problems)
    (tmp_path / "keys/client.key_secret").unlink()
    assert any("client.key_secret" in text for text in found(settings, local=True))
    settings = demo(tmp_path / "run", "engine.name=hf", "bus.health_port=8081")
    (said,) = found(settings, local=True)
    assert "setting bus.health_port = 8081: all services of a run on one machine would serve" in said
    settings = demo(tmp_path / "run", 'bus.host="0.0.0.0"')
    assert any("bus.curve_dir" in text for text in found(settings, local=True))


@pytest.mark.parametrize("transport", ["nccl", "ipc", "http"])
def test_weights_that_other_machines_could_ask_for_want_keys(tmp_path: Path, transport: str) -> None:
    overrides = (f"weights.transport={transport}", 'weights.host="0.0.0.0"')
    with pytest.raises(SettingsError, match=r"weights\.host: '0\.0\.0\.0' .*`tether keys DIR`"):
        demo(tmp_path / "run", *overrides)
    assert demo(tmp_path / "run", *overrides, f'bus.curve_dir="{tmp_path}"').weights.host == "0.0.0.0"
    assert demo(tmp_path / "run", "weights.transport=shm", 'weights.host="0.0.0.0"')


def test_prompts_may_be_as_long_as_every_engine_of_a_pool_allows(tmp_path: Path) -> None:
    pool = "services.pool=[{count=1, engine={name='hf', max_model_len=32}}, {count=1}]"
    settings = demo(tmp_path / "run", pool, "sampling.max_tokens=2")
    assert settings.rendering.max_prompt_tokens == 30
    assert demo(tmp_path / "run", "sampling.max_tokens=2").rendering.max_prompt_tokens == 62
    assert demo(tmp_path / "run", "render.max_prompt_tokens=7").rendering.max_prompt_tokens == 7


def test_a_package_that_copies_need_is_named(tmp_path: Path) -> None:
    url = "s3://bucket/run"
    given = (f"run.remote={url}", "weights.transport=http", f"weights.url={url}")
    for setting, problem in zip(
        ("run.remote", "weights.url"), found(demo(tmp_path / "run", *given)), strict=True
    ):
        assert problem.startswith(f"setting {setting}: {url}: ImportError: Install s3fs")


@pytest.mark.parametrize(
    ("name", "offline", "token", "says"),
    [
        ("mine", False, "hf_token", " = 'mine': that is not OWNER/NAME, a model on the hub"),
        ("some-org/mine", True, "hf_token", ": HF_HUB_OFFLINE is set, so nothing is uploaded; unset it"),
        ("some-org/mine", False, "", ": there is no token; `hf auth login`, or set HF_TOKEN"),
        ("some-org/mine", False, "hf_token", ""),
    ],
)
def test_upload_to_the_hub_needs_a_name_and_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, offline: bool, token: str, says: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", token)
    problems = found(demo(tmp_path / "run", f"run.hub={name}"))
    assert problems == ([f"setting run.hub{says}"] if says else [])


def test_a_tracking_library_that_is_missing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert found(demo(tmp_path / "run", "tracking.kind=['tensorboard', 'wandb']")) == [
        "setting tracking.kind = 'wandb': wandb is not installed; "
        "pip install 'tether-rl[wandb]', or remove the setting"
    ]


@pytest.mark.parametrize(
    ("command", "says"),
    [("no-such-program", "there is no program 'no-such-program' in PATH"), ("python", "")],
)
def test_program_that_is_not_installed_is_found(tmp_path: Path, command: str, says: str) -> None:
    program = (
        "environment.name=command",
        f'environment.options={{command=["{command}"], tool_syntax="none"}}',
    )
    problems = found(demo(tmp_path / "run", *program, "services.spares=false"), local=True)
    assert [says in problem for problem in problems if "environment.options" in problem] == [True] * bool(
        says
    )


@pytest.mark.parametrize(("function", "words"), [("score", "ValueError: invalid literal"), ("gone", "gone")])
def test_check_run_tries_the_users_reward_on_a_real_row(tmp_path: Path, function: str, words: str) -> None:
    verifier = (
        f'reward.verifiers=[{{name="function",options={{path="{number_reward.__name__}:{function}"}}}}]'
    )
    (problem,) = found(demo(tmp_path / "run", verifier), local=True)
    assert words in problem


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["prompts.passes=1", "bound.groups_per_step=3"], "10 in 1 pass, which end after step 3;"),
        (["prompts.passes=0"], "without end;"),
        (
            ["render.max_prompt_tokens=2", "prompts.passes=1"],
            "held out; 3 of the first 10 are longer than 2 tokens",
        ),
        (
            ["prompts.held_out=8", "prompts.passes=0"],
            "6 held out (2 of 8 repeat others, or occur in training)",
        ),
        (
            ["sampling.samples_per_prompt=8", "sampling.keep_first=6"],
            "WARNING: the first 6 of 8 samples to finish are trained, so long answers are left out",
        ),
        ([f"reward.verifiers=[{HALF}]"], "worker(s): positions, half (exact_match, weight 0.5)"),
        (["algorithm.name=gspo"], "clips 0.2 and 0.2 (the paper has 3e-4 and 4e-4"),
        (
            ["algorithm.name=gspo", "algorithm.clip_low=3e-4"],
            "gspo, lr 0.0015, clips 0.0003 and 0.2\n",
        ),
    ],
)
def test_describe_run_says_which_prompts_are_not_trained_and_how_far_ratios_go(
    tmp_path: Path, overrides: list[str], words: str
) -> None:
    settings = demo(tmp_path / "run", *overrides)
    longer = [{**row, "prompt": "12="} if row["answer"] in "123" else row for row in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in longer))
    findings = check_run(settings)
    assert findings.model is not None
    assert findings.source is not None
    assert words in "\n".join(describe_run(settings, findings.model, findings.source))


def test_describe_run_warns_of_characters_that_the_tokenizer_leaves_out(tmp_path: Path) -> None:
    settings = with_model(tmp_path / "run", model_in(tmp_path / "model"), 'render.suffix="Answer: "')
    findings = check_run(settings)
    assert findings.model is not None
    assert findings.source is not None
    lines = describe_run(settings, findings.model, findings.source)
    assert (
        "first    WARNING: the tokenizer has no tokens for ':Aenrsw', which the model does not read" in lines
    )

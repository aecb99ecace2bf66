"""Tests that a reward model's scores are those of transformers for each text alone, and what it refuses."""

import math
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SettingsError
from reward.config import RewardConfig, VerifierConfig
from reward.group import ResponseGroup
from reward.verifiers.registry import make_verifier
from reward.workers.pool import ScorePool
from tests.changes import slow_unless_changed
from tests.reward.reward_models import logits_of_transformers, write_reward_model

PROMPT = "what is 6 times 7?"
RESPONSES = ["42", "it is 42 i think", "", "no idea", "4" * 300]


def scored(path: Path, **options: Any) -> list[float]:
    group = ResponseGroup(PROMPT, RESPONSES, {}, [1] * len(RESPONSES), ["stop"] * len(RESPONSES))
    found = make_verifier("reward_model", {"path": str(path), **options}).score(group, range(len(RESPONSES)))
    assert None not in found
    return [score for score in found if score is not None]


@pytest.mark.parametrize("pad", [None, 0])
@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_scores_are_those_of_each_text_alone(pad: int | None, batch_size: int, tmp_path: Path) -> None:
    path = write_reward_model(tmp_path / "model", pad=pad)
    wanted = logits_of_transformers(path, [PROMPT + response for response in RESPONSES])
    assert scored(path, batch_size=batch_size) == pytest.approx(wanted, abs=1e-5)
    assert len({round(score, 3) for score in wanted}) == len(RESPONSES)


def test_a_chat_template_is_used_where_there_is_one(tmp_path: Path) -> None:
    path = write_reward_model(tmp_path / "model", template=True)
    chat = [f"user: {PROMPT}\nassistant: {response}\n" for response in RESPONSES]
    wanted = logits_of_transformers(path, chat, special=False)
    assert scored(path) == scored(path, text="chat") == pytest.approx(wanted, abs=1e-5)
    plain = logits_of_transformers(path, [f"{PROMPT} {response}" for response in RESPONSES])
    assert scored(path, text="plain", separator=" ") == pytest.approx(plain, abs=1e-5)


def test_lengths_are_limited_and_scores_squashed(tmp_path: Path) -> None:
    path = write_reward_model(tmp_path / "model")
    wanted = logits_of_transformers(path, [PROMPT + response for response in RESPONSES], limit=20)
    found = scored(path, max_length=20, sigmoid=True)
    assert found == pytest.approx([1 / (1 + math.exp(-score)) for score in wanted], abs=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": "nowhere"}, "no model in nowhere"),
        ({"path": "labels"}, r"with 2 label\(s\)"),
        ({"path": "good", "text": "chatty"}, "did you mean 'chat'"),
        ({"path": "good", "dtype": "int8"}, "dtype"),
        ({"path": "good", "device": "tpu"}, "use cpu, cuda"),
        ({"path": "good", "tensor_parallel_size": 2}, "2: transformers computes on one device"),
        (
            {"path": "good", "tensor_parallel_size": 2, "engine": "vllm", "device": "cuda:1"},
            "'cuda:1': a model on 2 GPUs has the first ones",
        ),
        ({"path": "good", "python": "python3"}, "option python: transformers computes in the worker"),
        ({"path": "good", "environment": {"A": "b"}, "engine": "vllm"}, "option environment: vllm computes"),
        ({"path": "good", "engine": "sglang", "python": "/no/python"}, "'/no/python' is not a program"),
        (
            {"path": "good", "tensor_parallel_size": 2, "engine": "sglang", "device": "cuda:0"},
            "'cuda:0': a model on 2 GPUs has the first ones",
        ),
        ({"path": "good", "engine": "vlm"}, "did you mean 'vllm'"),
        ({"path": "good", "batch_size": 0}, "batch_size: 0 is not at least 1"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(
    options: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_reward_model(tmp_path / "good")
    write_reward_model(tmp_path / "labels", labels=2)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=words):
        make_verifier("reward_model", options)


@slow_unless_changed("reward/classifiers/", "reward/verifiers/", "reward/workers/", "deploy/locks/cpu.txt")
async def test_a_worker_loads_the_model_at_its_start_and_names_what_fails(tmp_path: Path) -> None:
    path = write_reward_model(tmp_path / "model")

    def config(**options: Any) -> RewardConfig:
        verifier = VerifierConfig("reward_model", options={"path": str(path), **options})
        return RewardConfig(verifiers=(verifier,), workers=1)

    async with ScorePool(config()) as pool:
        found = (await pool.score(PROMPT, RESPONSES, {})).rewards
    assert found == pytest.approx(scored(path), abs=1e-5)
    with pytest.raises(SettingsError, match=r"reward\.memory_mb: 4096 .* set it to 0"):
        async with ScorePool(config(device="cuda")):
            raise AssertionError("it started")


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    path = write_reward_model(tmp_path / "model")
    (path / "model.safetensors").write_bytes(b"broken")
    verifier = make_verifier("reward_model", {"path": str(path)})
    with pytest.raises(SettingsError, match="cannot be loaded on cpu"):
        verifier.load()

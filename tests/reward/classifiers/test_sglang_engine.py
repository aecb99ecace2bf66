"""Compares SGLang's logits of a sequence classifier with those of transformers, the oracle."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import SettingsError
from reward.classifiers.sglang_engine import BIAS, BIAS_FILE, ENDED, INDEX, write_model
from reward.combine import VerifierError
from reward.config import RewardConfig, VerifierConfig
from reward.verifiers.registry import make_verifier
from reward.workers.pool import ScorePool
from tests.contracts.sglang_environment import sglang_settings
from tests.reward.classifiers.test_vllm_engine import PROMPT, RESPONSES, TEXTS, TOLERANCE
from tests.reward.reward_models import logits_of_transformers, write_reward_model


def pool_of(path: Path, ranks: int) -> ScorePool:
    options = {"path": str(path), "engine": "sglang", "batch_size": 4, "kv_cache_mb": 64}
    options |= {"tensor_parallel_size": ranks, **of_sglang(ranks)}
    verifiers = (VerifierConfig("reward_model", options=options),)
    return ScorePool(RewardConfig(verifiers=verifiers, workers=1, start_timeout_s=600, timeout_s=120))


def of_sglang(ranks: int) -> Mapping[str, Any]:
    given = sglang_settings(ranks)
    return {name: given[name] for name in ("python", "environment") if name in given}


def engine_processes() -> list[psutil.Process]:
    """Processes of SGLang that this test has started."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if "sglang" in " ".join(process.cmdline())]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "pad", "ranks"), [("llama", 2, 1), ("qwen2", None, 2)])
async def test_logits_of_sglang_are_those_of_transformers(
    kind: str, pad: int | None, ranks: int, tmp_path: Path
) -> None:
    path = write_reward_model(tmp_path / "model", pad=pad, hidden=128, kind=kind)
    async with pool_of(path, ranks) as pool:
        await assert_exact(pool, path)
        started = engine_processes()
    assert len(started) > ranks  # the child, and a process of SGLang for each rank
    _, alive = psutil.wait_procs(started, timeout=30)
    assert alive == []


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_worker_whose_engine_is_killed_is_replaced(tmp_path: Path) -> None:
    path = write_reward_model(tmp_path / "model", hidden=128)
    async with pool_of(path, ranks=1) as pool:
        await assert_exact(pool, path)
        killed = engine_processes()
        for process in killed:
            process.kill()
        psutil.wait_procs(killed, timeout=30)
        with pytest.raises(VerifierError, match=f"the worker process ended, exit code {ENDED}"):
            await pool.score(PROMPT, RESPONSES, {})
        await assert_exact(pool, path)


async def assert_exact(pool: ScorePool, path: Path) -> None:
    """Compare the scores of all texts, and of some of them, with the logits of transformers."""
    found = (await pool.score(PROMPT, RESPONSES, {})).rewards
    assert found == pytest.approx(logits_of_transformers(path, TEXTS), abs=TOLERANCE)
    assert len({round(score, 3) for score in found}) == len(RESPONSES)
    again = (await pool.score(PROMPT, RESPONSES[:2], {})).rewards
    assert again == pytest.approx(found[:2], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"python": sys.executable}, "option engine: sglang: ModuleNotFoundError: No module named 'sglang'"),
        ({"python": "/bin/false"}, "sglang: SGLang ended with code 1 at its start"),
        ({"device": "cuda"}, "option dtype: float32: SGLang's kernels"),
    ],
)
def test_an_engine_that_cannot_start_is_named(options: Mapping[str, Any], words: str, tmp_path: Path) -> None:
    path = write_reward_model(tmp_path / "model")
    with pytest.raises(SettingsError, match=words):
        make_verifier("reward_model", {"path": str(path), "engine": "sglang", **options}).load()


def test_the_links_of_a_model_have_a_bias_for_its_head(tmp_path: Path) -> None:
    """One that has a bias keeps it; an index names the new file, as loaders read only files that it names."""
    path, plain = write_reward_model(tmp_path / "model"), tmp_path / "plain"
    plain.mkdir()
    write_model(path, plain)
    assert load_file(plain / BIAS_FILE)[BIAS].tolist() == [0.0]
    weights = load_file(path / "model.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights, "model.safetensors")}))
    indexed = tmp_path / "indexed"
    indexed.mkdir()
    write_model(path, indexed)
    assert json.loads((indexed / INDEX).read_text())["weight_map"][BIAS] == BIAS_FILE
    assert BIAS not in json.loads((path / INDEX).read_text())["weight_map"]
    save_file({**weights, BIAS: torch.ones(1)}, path / "model.safetensors")
    biased = tmp_path / "biased"
    biased.mkdir()
    write_model(path, biased)
    assert not (biased / BIAS_FILE).exists()

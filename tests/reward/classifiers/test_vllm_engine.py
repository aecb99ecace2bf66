"""Compares vLLM's logits of a sequence classifier with those of transformers, the oracle."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from reward.config import RewardConfig, VerifierConfig
from reward.workers.pool import ScorePool
from tests.reward.reward_models import logits_of_transformers, write_reward_model

PROMPT = "what is 6 times 7?"
RESPONSES = ["42", "it is 42 i think", "", "no idea", "4" * 300, "ends with 0000"]
TEXTS = [PROMPT + response for response in RESPONSES]
TOLERANCE = 1e-4
"""Largest difference of logits between -10 and 10, in float32: kernels add up in another order."""


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "pad", "ranks"), [("qwen2", None, 1), ("llama", 2, 1), ("qwen2", None, 2)])
async def test_logits_of_vllm_are_those_of_transformers(
    kind: str, pad: int | None, ranks: int, tmp_path: Path
) -> None:
    path = write_reward_model(tmp_path / "model", pad=pad, hidden=128, kind=kind)
    options = {"path": str(path), "engine": "vllm", "batch_size": 4, "kv_cache_mb": 64}
    options["tensor_parallel_size"] = ranks
    config = RewardConfig(
        verifiers=(VerifierConfig("reward_model", options=options),), workers=1, start_timeout_s=400
    )
    async with ScorePool(config) as pool:
        found = (await pool.score(PROMPT, RESPONSES, {})).rewards
        again = (await pool.score(PROMPT, RESPONSES[:2], {})).rewards
    assert again == pytest.approx(found[:2], abs=TOLERANCE)
    assert found == pytest.approx(logits_of_transformers(path, TEXTS), abs=TOLERANCE)
    assert len({round(score, 3) for score in found}) == len(RESPONSES)


@pytest.mark.engine
@pytest.mark.slow
def test_classifier_that_vllm_cannot_load_is_named(tmp_path: Path) -> None:
    path = write_reward_model(tmp_path / "model", hidden=128)
    code = (
        "import json, sys\n"
        "from reward.verifiers.registry import make_verifier\n"
        "try:\n"
        "    make_verifier('reward_model', json.loads(sys.argv[1])).load()\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    for options, says in (
        ({"device": "cuda"}, "the vLLM of this Python computes on the CPU"),
        ({"kv_cache_mb": 1, "max_length": 4096}, "cannot be loaded on cpu by vllm"),
    ):
        given = json.dumps({"path": str(path), "engine": "vllm", **options})
        done = subprocess.run([sys.executable, "-c", code, given], capture_output=True, text=True)
        assert says in done.stdout, done.stdout + done.stderr[-2000:]
        assert done.stdout.splitlines()[-1].startswith("SettingsError verifier reward_model: ")

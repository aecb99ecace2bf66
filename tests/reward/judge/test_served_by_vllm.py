"""A judge that vLLM's own server runs: its answers are forced into the form of a score."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from reward.config import RewardConfig, VerifierConfig
from reward.workers.pool import ScorePool
from rollout.engines.contract.models import tiny_model
from tests.rollout.tokenizers import TEMPLATE, write_tokenizer


@pytest.mark.engine
@pytest.mark.slow
async def test_a_judge_served_by_vllm_always_gives_a_score(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "model", template=TEMPLATE)
    tiny_model(1).save_pretrained(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["-m", "vllm.entrypoints.openai.api_server", "--model",
               str(tmp_path / "model"), "--port", str(port),
               "--host", "127.0.0.1", "--served-model-name", "judge", "--enforce-eager",
               "--max-model-len", "512"]  # fmt: skip
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, *command], stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        await is_healthy(server, f"http://127.0.0.1:{port}/health", tmp_path / "log")
        options = {
            "url": f"http://127.0.0.1:{port}/v1", "model": "judge", "prompt": "Rate {response}", "lowest": 1,
            "highest": 10, "extra": {"structured_outputs": {"regex": "10|[1-9]"}}, "max_tokens": 8,
        }  # fmt: skip
        config = RewardConfig(verifiers=(VerifierConfig("judge", options=options),), timeout_s=60.0)
        async with ScorePool(config) as pool:
            rewards = (await pool.score("q", ["a", "b", "c"], {})).rewards
        assert len(rewards) == 3
        assert all(0 <= reward <= 1 for reward in rewards)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait()


async def is_healthy(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Wait until the server answers."""
    async with asyncio.timeout(400), aiohttp.ClientSession() as client:
        while True:
            assert server.poll() is None, log.read_text()[-3000:]
            try:
                async with client.get(url) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.5)

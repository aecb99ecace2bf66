"""Tests which verifiers an audit calls a second time."""

import asyncio

import pytest

from reward.config import RewardConfig, VerifierConfig
from services.audit.second_worker import second_worker


@pytest.mark.parametrize("name", ["python_tests", "reasoning_gym"])
async def test_text_of_the_model_is_executed_by_no_second_worker(name: str) -> None:
    config = RewardConfig(verifiers=(VerifierConfig(), VerifierConfig(name=name)))
    async with second_worker(config, ()) as rewards_again:
        assert await asyncio.to_thread(rewards_again, None) is None  # type: ignore[arg-type]

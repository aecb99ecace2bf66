"""The trainer does not believe the ledger: a token over the bound of its lease ends the run, whoever let it
through."""

import asyncio
from pathlib import Path

import pytest
import redis

from services.runtime.errors import EXIT_FAILED, describe_error
from services.settings.sections import Settings
from tests.integration.loop import running, settings_for

SPOIL = """
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local group = cjson.decode(redis.call('HGET', KEYS[2], id))
  group.max_staleness = -1
  redis.call('HSET', KEYS[2], id, cjson.encode(group))
end
"""
"""Scored groups are said to have been leased under a bound that no token keeps."""


async def spoilt(settings: Settings) -> None:
    """A run whose ledger lies; it ends only by an error."""
    async with asyncio.timeout(400), running(settings) as live:
        keys = live.ledger.keys
        with redis.Redis.from_url(live.settings.ledger.url) as client:
            while True:
                client.eval(SPOIL, 2, keys.of("scored"), keys.of("groups"))
                await asyncio.sleep(0.001)


async def test_a_token_over_the_bound_ends_the_run_and_names_the_group(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "stragglers.toml", "bound.staleness_policy=wait", "run.steps=1000")
    with pytest.raises(BaseExceptionGroup) as caught:
        await spoilt(settings)
    line, code = describe_error(caught.value)
    assert line.startswith("BoundViolation: group ")
    assert line.endswith("over the bound of -1")
    assert code == EXIT_FAILED

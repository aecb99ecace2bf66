"""Tests the check for SGLang's memory saver."""

import sys
from importlib.util import find_spec

import pytest

from protocol.errors import EngineSettingsError
from rollout.engines.sglang.memory import SAVER, check_memory_saver


@pytest.mark.skipif(find_spec(SAVER) is not None, reason="here it is there")
async def test_sleep_without_the_memory_saver_is_refused_by_name() -> None:
    with pytest.raises(
        EngineSettingsError, match=rf"enable_sleep_mode is true, but {sys.executable} has no {SAVER}"
    ):
        await check_memory_saver(sys.executable)

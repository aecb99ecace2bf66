"""Tests that a worker learns how full its engine is, knows whether it may have its connections, and what its
spare imports."""

import asyncio
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from rollout.engines.base import EngineConfig, Occupancy
from rollout.engines.scripted import ScriptedEngine
from services.rollout.service import RESERVED_FILES, allow_open_files, read_occupancy
from tests.changes import slow_unless_changed
from tests.integration.command import environment
from tests.integration.loop import ROOT

HUB = "huggingface_hub.constants"
PRELOAD = f"""
import sys
from services.rollout.service import preload
from services.settings.load import load_settings
preload(load_settings(overrides=['engine.name="scripted"', *sys.argv[1:]]))
print({HUB!r} in sys.modules, 'rollout.engines.scripted' in sys.modules)
"""


class Silent(ScriptedEngine):
    """Engine in the middle of a step that does not end."""

    async def occupancy(self) -> Occupancy:
        await asyncio.Event().wait()
        return Occupancy(1)


async def test_occupancy_is_the_engines(tmp_path: Path) -> None:
    engine = ScriptedEngine(EngineConfig(name="scripted"), tmp_path, "e")
    await engine.start()
    assert await read_occupancy(engine, 60) == Occupancy(running=0)


async def test_occupancy_of_an_engine_that_does_not_say_is_not_known(tmp_path: Path) -> None:
    closed = ScriptedEngine(EngineConfig(name="scripted"), tmp_path, "e")
    await closed.close()
    assert await read_occupancy(closed, 60) == Occupancy()
    assert await read_occupancy(Silent(EngineConfig(name="scripted"), tmp_path, "s"), 0.01) == Occupancy()


def test_too_few_open_files_are_refused_with_both_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 1024))
    needed = RESERVED_FILES + 2 * 1024
    with pytest.raises(SettingsError, match=rf"may have 1024.*`ulimit -n {needed}`.*lower"):
        allow_open_files(1024, 2, 1)


def test_a_limit_that_may_be_raised_is_raised() -> None:
    limits, needed = resource.getrlimit(resource.RLIMIT_NOFILE), RESERVED_FILES + 2 * 3
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed - 1, limits[1]))
    try:
        allow_open_files(2, 1, 3)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == needed
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_samples_without_connections_need_no_files() -> None:
    allow_open_files(10**6, 10**5, 0)
    allow_open_files(1, 8, 3)


@slow_unless_changed("services/rollout/", "services/runtime/", "services/spare.py", "services/settings/")
@pytest.mark.parametrize(
    ("setting", "imported"), [("model.path=owner/name", "True True"), ("run.name=r", "False True")]
)
def test_a_spare_imports_the_client_of_the_hub_before_an_engine_sets_it_offline(
    setting: str, imported: str
) -> None:
    words = [sys.executable, "-c", PRELOAD, setting]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.split() == imported.split()

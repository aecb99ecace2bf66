"""Tests how a user's own modules are found."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from reward.config import RewardConfig, VerifierConfig
from reward.workers.pool import ScorePool
from services.runtime.user_modules import add_user_modules
from services.settings.sections import RunConfig, Settings

VERIFIER = """
from dataclasses import dataclass
import json

@dataclass(frozen=True)
class Options: pass

def score(prompt, response, metadata, options):
    return float(len(json.dumps(response)))
"""


@pytest.fixture
def modules(tmp_path: Path) -> str:
    """A directory with a verifier, and with a module named as one of Python."""
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "length.py").write_text(VERIFIER)
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    return str(tmp_path)


def test_directories_are_appended_once_and_last(modules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", list(before))
    settings = replace(Settings(), run=RunConfig(modules=(modules,)))
    assert add_user_modules(settings) == (modules,)
    add_user_modules(settings)
    assert sys.path == [*before, modules]


def test_a_missing_directory_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    before = list(sys.path)
    with pytest.raises(SettingsError, match=r"setting run\.modules: there is no directory .*/nowhere"):
        add_user_modules(replace(Settings(), run=RunConfig(modules=(str(tmp_path / "nowhere"),))))
    assert sys.path == before


async def test_reward_workers_find_them_and_they_replace_nothing(modules: str) -> None:
    config = RewardConfig(verifiers=(VerifierConfig("mine.length"),), workers=1)
    async with ScorePool(config, [modules]) as pool:
        combined = (await pool.score("", ["four"], {})).rewards
    assert combined == [6.0]

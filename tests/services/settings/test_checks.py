"""Settings that each are right, and exclude each other."""

import pytest

from protocol.errors import SettingsError
from rollout.environments.registry import OF_SESSIONS
from services.settings.load import load_settings


@pytest.mark.parametrize("name", OF_SESSIONS)
@pytest.mark.parametrize("setting", ["trainer.routing_replay", "engine.enable_return_routed_experts"])
def test_no_environment_of_sessions_records_experts(setting: str, name: str) -> None:
    with pytest.raises(
        SettingsError, match=f"setting {setting}: environment '{name}' does not record experts"
    ):
        load_settings(None, [f"{setting}=true", "engine.name=hf", f"environment.name={name}"], environ={})

"""Tests that names of Megatron and RLinf which do not exist here are refused with the reason."""

from pathlib import Path

import pytest

from protocol.errors import SettingsError
from services.settings.load import load_settings
from services.settings.sources import ABSENT


@pytest.mark.parametrize("section", ["parallel", "trainer"])
@pytest.mark.parametrize("name", ABSENT)
def test_absent_setting_is_refused_with_its_reason(tmp_path: Path, section: str, name: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(None, [f'run.dir="{tmp_path}"', f"{section}.{name}=1"], environ={})
    assert f"setting {section}.{name} does not exist: {ABSENT[name]}" in str(refused.value)

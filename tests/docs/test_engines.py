"""Checks the settings that docs/engines.md, weights.md and rewards.md show."""

from pathlib import Path

import pytest

from rollout.engines.arguments import check_known
from services.settings.load import load_settings
from tests.docs.pages import blocks

TABLES = [
    text
    for page in ("engines.md", "weights.md", "rewards.md")
    for language, _, text in blocks(page)
    if language == "toml" and text.startswith("[")  # not the options of a verifier alone
]


@pytest.mark.parametrize("table", TABLES)
def test_settings_of_the_page_are_right(table: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(table)
    check_known(load_settings(str(path), environ={}).engine, "engine.arguments")

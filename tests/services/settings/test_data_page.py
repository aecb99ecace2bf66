"""The configurations of docs/data.md are settings that load."""

import re
from pathlib import Path

import pytest

from rollout.prompts.named_source import check_names
from rollout.prompts.row_fields import compile_pattern, parse_template
from services.settings.load import load_settings
from tests.integration.loop import ROOT

BLOCKS = re.findall(r"^```toml\n(.*?)^```$", (ROOT / "docs/data.md").read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_of_the_page_loads(block: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(block)
    settings = load_settings(str(path), environ={})
    check_names(settings.prompts.mixture, "prompts.mixture")
    check_names(settings.eval.sets, "eval.sets")
    for source in (settings.prompts, *settings.prompts.mixture, *settings.eval.sets):
        parse_template(source.template or "")
        compile_pattern(source.answer_pattern or "()")


def test_the_page_has_blocks() -> None:
    assert len(BLOCKS) >= 5

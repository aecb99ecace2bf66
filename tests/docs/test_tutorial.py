"""Runs docs/tutorial.md as it is written."""

import json
import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, blocks, follow

pytestmark = pytest.mark.xdist_group("tutorial")  # one fixture for the module

PAGE = "tutorial.md"


def test_every_block_is_a_file_or_is_run() -> None:
    assert (DOCS / PAGE).read_text().count("```") == 2 * len(list(blocks(PAGE)))
    assert {language for language, name, _ in blocks(PAGE) if not name} == {"bash"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which everything was done that the tutorial says."""
    place = tmp_path_factory.mktemp("tutorial")
    (place / "printed").write_text(follow(PAGE, place))
    return place


def test_the_model_learns_the_readers_task(place: Path) -> None:
    lines = [json.loads(line) for line in (place / "my-run/run/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 20
    assert lines[0]["reward_mean"] < 0.4
    assert lines[-1]["reward_mean"] > 0.6
    assert re.search(r"^372= -> \d$", (place / "printed").read_text(), re.MULTILINE)


def test_both_runs_verify(place: Path) -> None:
    printed = (place / "printed").read_text()
    assert len(re.findall(r"steps 20 .*violations 0", printed)) == 1
    assert len(re.findall(r"max_lag 0 .*steps 5 .*violations 0", printed)) == 1

"""Runs docs/tutorial.md as it is written, from a directory whose files have the names of our packages."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.changes import PAGES, slow_unless_changed
from tests.docs.pages import DOCS, blocks, follow
from tests.integration.command import environment

PAGE = "tutorial.md"
AS_WRITTEN = slow_unless_changed(f"docs/{PAGE}", *PAGES)
pytestmark = pytest.mark.xdist_group("tutorial")  # one fixture for the module
TRAPS = ("reward.py", "rollout.py", "json.py", "trainer/__init__.py")


def test_every_block_is_a_file_or_is_run() -> None:
    assert (DOCS / PAGE).read_text().count("```") == 2 * len(list(blocks(PAGE)))
    assert {language for language, name, _ in blocks(PAGE) if not name} == {"bash"}


def set_traps(place: Path) -> None:
    for trap in TRAPS:
        (place / trap).parent.mkdir(exist_ok=True)
        (place / trap).write_text("raise SystemExit('the wrong module')\n")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which everything was done that the tutorial says."""
    place = tmp_path_factory.mktemp("tutorial")
    set_traps(place)
    (place / "printed").write_text(follow(PAGE, place))
    return place


@AS_WRITTEN
def test_the_model_learns_the_readers_task(place: Path) -> None:
    lines = [json.loads(line) for line in (place / "my-run/run/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 20
    assert lines[0]["reward_mean"] < 0.4
    assert lines[-1]["reward_mean"] > 0.6
    assert {line["groups"] for line in lines} == {32}
    printed = (place / "printed").read_text()
    assert f"run first in {place}/my-run/run: 20 steps, E=1, B=32, mask" in printed
    assert re.search(r"^372= -> \d$", printed, re.MULTILINE)


@AS_WRITTEN
def test_both_runs_verify(place: Path) -> None:
    printed = (place / "printed").read_text()
    assert len(re.findall(r"steps 20 .*violations 0", printed)) == 1
    assert len(re.findall(r"max_lag 0 .*steps 5 .*violations 0", printed)) == 1


def test_a_command_starts_where_files_have_our_names(tmp_path: Path) -> None:
    """`-m` puts the working directory first on the path. `place` has such files for services, too."""
    set_traps(tmp_path)

    def tether(*words: str) -> str:
        result = subprocess.run(
            [sys.executable, "-m", "services.cli", *words],
            cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    assert "next: tether check mine/config.toml" in tether("init", "mine")
    assert tether("check", "mine/config.toml").startswith("OK\n")

"""Runs docs/tutorial.md as it is written: blocks with a file name are files, blocks of bash are typed."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("tutorial")  # one fixture for the module

TUTORIAL = Path(__file__).resolve().parents[2] / "docs/tutorial.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def blocks() -> Iterator[tuple[str, str, str]]:
    """Yield language, file name and text of each block."""
    for block in BLOCK.finditer(TUTORIAL.read_text()):
        yield block[1], block[2] or "", block[3]


def test_every_block_is_a_file_or_is_run() -> None:
    assert TUTORIAL.read_text().count("```") == 2 * len(list(blocks()))
    assert {language for language, name, _ in blocks() if not name} == {"bash"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which everything was done that the tutorial says."""
    place = tmp_path_factory.mktemp("tutorial")
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for _, name, text in blocks():
        if name:
            (place / name).write_text(text)
            continue
        command = ["bash", "-eu", "-c", text]
        result = subprocess.run(command, cwd=place, env=environ, capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, f"{text}\n{result.stdout}\n{result.stderr}"
        with (place / "printed").open("a") as printed:
            printed.write(result.stdout)
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

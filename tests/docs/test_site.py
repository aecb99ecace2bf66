"""Builds the site of a copy of the documents, as the gate `make check` does."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.changes import slow_unless_changed
from tests.docs.pages import DOCS

ROOT = DOCS.parent
pytestmark = slow_unless_changed("docs/", "results/", "mkdocs.yml", "Makefile", "tests/docs/test_site.py")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The repository with links to everything but the documents, which may be changed."""
    for path in ROOT.iterdir():
        if path.name == "docs":
            shutil.copytree(path, tmp_path / path.name)
        elif not path.name.startswith((".", "build", "runs")):
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


def make_docs(place: Path) -> subprocess.CompletedProcess[str]:
    ready = f"VENV={sys.prefix}", "--assume-old", f"{sys.prefix}/.ready"
    environ = {**os.environ, "MAKEFLAGS": ""}
    command = ["make", "docs", *ready]
    return subprocess.run(command, cwd=place, env=environ, capture_output=True, text=True, timeout=300)


def test_site_is_built_with_the_results(copy: Path) -> None:
    result = make_docs(copy)
    assert result.returncode == 0, result.stdout + result.stderr
    site = copy / "build/site"
    assert {"index.html", "results/index.html", "results/staleness.png"} <= {
        path.relative_to(site).as_posix() for path in site.rglob("*.*")
    }


def test_dead_links_fail_the_gate_and_are_named(copy: Path) -> None:
    dead = ["nowhere.md", "../trainer/nowhere/", "../results/nothing.md", "tutorial.md#no-such-heading"]
    with (copy / "docs/install.md").open("a") as page:
        page.writelines(f"\n[dead]({target})\n" for target in dead)
    result = make_docs(copy)
    assert result.returncode != 0
    output = result.stdout + result.stderr
    assert [target for target in dead if target.removeprefix("../") not in output] == []


def test_check_builds_the_site() -> None:
    _, _, recipe = (ROOT / "Makefile").read_text().partition("\ncheck: ")
    assert "\t$(MAKE) docs\n" in recipe.partition("\n\n")[0] + "\n"

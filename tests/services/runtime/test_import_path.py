"""Tests that our packages are imported, whatever the working directory and PYTHONPATH hold."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.runtime.import_path import PACKAGES, ROOT, safe_environment
from tests.changes import slow_unless_changed
from tests.integration.command import environment

TRAP = "raise SystemExit('the wrong module')\n"
PROGRAM = """
import json, sys
import protocol, reward, rollout, trainer, services, services.settings.load
print(json.dumps([module.__file__ for module in (protocol, reward, rollout, trainer, services)]))
"""


@pytest.fixture
def traps(tmp_path: Path) -> Path:
    """A directory with modules and packages that must not be imported."""
    for name in ("reward", "protocol", "json", "torch", "uvloop"):
        (tmp_path / f"{name}.py").write_text(TRAP)
    for name in ("trainer", "rollout"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(TRAP)
    return tmp_path


def run(cwd: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd, env=environment(**variables), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


CHANGED = slow_unless_changed("services/runtime/", "services/reward.py", "services/cli.py")


@pytest.mark.parametrize(
    "service",
    [
        "services.prepare",
        *(pytest.param(service, marks=CHANGED) for service in ("services.reward", "services.cli")),
    ],
)
def test_a_service_starts_where_files_have_our_names(traps: Path, service: str) -> None:
    done = run(traps, "-m", service, TETHER_CONFIG="nowhere.toml")
    assert "the wrong module" not in done.stderr
    assert "Traceback" not in done.stderr
    assert "nowhere.toml" in done.stderr or "Usage" in done.stdout


def test_child_processes_import_ours_before_those_of_the_python_path(traps: Path) -> None:
    for name in ("json", "torch", "uvloop"):  # PYTHONPATH may replace these, as it may everywhere
        (traps / f"{name}.py").unlink()
    safe = safe_environment(environment(PYTHONPATH=str(traps)))
    assert safe["PYTHONPATH"].split(os.pathsep)[-1] == str(traps)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=traps, env=safe, capture_output=True, text=True, check=False
    )
    assert all(f"{ROOT}/{name}/__init__.py" in done.stdout for name in (*PACKAGES, "services")), done.stderr


def test_our_packages_come_first_even_if_the_python_path_has_others(traps: Path) -> None:
    (traps / "json.py").unlink()
    program = f"import sys; sys.path[1:1] = [{str(traps)!r}]; import services; {PROGRAM}"
    done = run(Path("/"), "-P", "-c", program)
    assert all(f"{ROOT}/{name}/__init__.py" in done.stdout for name in PACKAGES), done.stderr

"""Decides which dear tests run by default: where a file changed on which they depend."""

import os
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SINCE = "CHANGED_SINCE"
"""Variable that names the commit to compare with; without it, the one before."""

ENGINES = (
    "rollout/engines/contract/",
    "rollout/engines/multi_process/",
    "rollout/staging/",
    "rollout/weights/",
    "protocol/weights/",
    "tests/contracts/engine",
    "tests/rollout/engines/test_contract.py",
)
"""How the paths begin on which the contract of every engine depends."""
SGLANG = (
    *ENGINES,
    "rollout/engines/sglang/",
    "tests/contracts/sglang",
    "tests/rollout/engines/sglang/",
    "deploy/locks/sglang-cpu.txt",
    "deploy/setup_layer.sh",
)
VLLM = (*ENGINES, "rollout/engines/vllm/", "tests/contracts/vllm", "deploy/locks/cpu.txt")
IN_PROCESS = (
    *ENGINES,
    "rollout/engines/in_process/",
    "rollout/engines/hf/",
    "rollout/engines/megatron/",
    "trainer/megatron/inference",
)
WEIGHTS = ("trainer/weights/", "rollout/weights/", "protocol/weights/")
"""How the paths begin on which the transport of versions depends."""
LAUNCHER = (
    "services/cli.py",
    "services/launcher/",
    "services/runtime/",
    "services/spare.py",
    "tests/integration/command.py",
)
"""How the paths begin on which runs under `tether up` depend; each test adds its own."""
PAGES = ("services/cli.py", "services/tools/templates/", "tests/docs/pages.py")
"""Beginnings for all pages that are done as they are written; each page adds its own path."""


def slow_unless_changed(*beginnings: str) -> pytest.MarkDecorator:
    """Return the mark `slow`, or `changed` where the path of a changed file begins so.

    Raises:
        ValueError: no file's path begins so.
    """
    if gone := [beginning for beginning in beginnings if not any(ROOT.glob(f"{beginning}*"))]:
        raise ValueError(f"no path begins with {', '.join(gone)}")
    return pytest.mark.changed if have_changed(beginnings, changes_here()) else pytest.mark.slow


def have_changed(beginnings: tuple[str, ...], changed: list[str] | None) -> bool:
    """Return whether a changed path begins so; also where it is not known which have changed."""
    return changed is None or any(path.startswith(beginnings) for path in changed)


@cache
def changes_here() -> list[str] | None:
    """Return what `changed_files` finds in this tree.

    Raises:
        pytest.UsageError: CHANGED_SINCE names no commit.
    """
    since = os.environ.get(SINCE)
    changed = changed_files(ROOT, since or "HEAD~1")
    if since and changed is None:
        raise pytest.UsageError(f"{SINCE}={since}: git knows no such commit here")
    return changed


def changed_files(root: Path, since: str) -> list[str] | None:
    """Return the paths that differ from a commit, with those that git does not know yet; None without it.

    A directory without git's history, and a clone of one commit, have nothing to compare with.
    """
    changed = _lines(root, "diff", "--name-only", "--no-renames", since, "--")
    unknown = _lines(root, "ls-files", "--others", "--exclude-standard")
    return None if changed is None or unknown is None else [*changed, *unknown]


def _lines(root: Path, *words: str) -> list[str] | None:
    """Return what git prints; None if it fails or is not there."""
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None

"""Tests the locked environments by the metadata of what is installed here: Pythons, and completeness."""

import re
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

LOCKS = Path(__file__).resolve().parents[1] / "deploy/locks"
OLDEST = "3.11.2"
"""The oldest Python 3.11 that is in use, that of Debian 12."""
GPU_HOST = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(lock: str) -> dict[str, str]:
    """Name -> version."""
    pinned = re.findall(r"^([\w.-]+)==(\S+)", (LOCKS / lock).read_text(), re.MULTILINE)
    return {normal(name): version for name, version in pinned}


def test_locked_packages_accept_the_python_of_debian_12() -> None:
    names = set(locked("cpu.txt"))
    needs = {
        normal(item.name): SpecifierSet(item.metadata.get("Requires-Python") or "")
        for item in distributions()
    }
    assert len(names & set(needs)) > 100
    assert {name: str(needs[name]) for name in names & set(needs) if OLDEST not in needs[name]} == {}


@pytest.mark.parametrize("lock", ["cuda.txt", "sglang-cuda.txt"])
def test_locks_for_gpus_have_what_their_packages_need(lock: str) -> None:
    """Check those that are installed here in the same version."""
    versions = locked(lock)
    same = [item for item in distributions() if versions.get(normal(item.name)) == item.version]
    assert len(same) > 80
    missing = {
        (item.name, need.name)
        for item in same
        for need in map(Requirement, item.requires or ())
        if (need.marker is None or need.marker.evaluate(GPU_HOST)) and normal(need.name) not in versions
    }
    assert missing == set()

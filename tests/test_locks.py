"""Tests the locked environments by what is installed here: Pythons, completeness, imports."""

import os
import re
import subprocess
from importlib.metadata import distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.changes import slow_unless_changed
from tests.contracts.sglang_environment import STAND_INS, sglang_python

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


IMPORT_ALL = """
import importlib, sys
from importlib.metadata import distribution, packages_distributions

modules = packages_distributions().items()
for name in sys.argv[1:]:
    found = distribution(name)
    print(name, found.version, *(need for need in found.requires or () if need.startswith("torch ")))
    for module in (module for module, owners in modules if name in owners and module.isidentifier()):
        importlib.import_module(module)
"""
"""Import all modules of the named packages; print name, version and what each needs of torch."""


@slow_unless_changed("deploy/locks/", "deploy/setup_layer.sh", "tests/contracts/sglang", "tests/test_locks")
def test_the_environment_of_sglang_can_be_imported_together() -> None:
    """torchvision is built for one torch, that of the environment below, and SGLang imports it."""
    versions = locked("sglang-cpu.txt")
    result = subprocess.run(
        [sglang_python(), "-c", IMPORT_ALL, *versions],
        env={**os.environ, "PYTHONPATH": str(STAND_INS)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = [line.split(maxsplit=2) for line in result.stdout.splitlines()]
    assert {name: found for name, found, *_ in lines} == versions
    needs = {name: Requirement(rest[0]).specifier for name, _, *rest in lines if rest and name != "sglang"}
    assert {name: str(need) for name, need in needs.items() if version("torch") not in need} == {}
    assert needs.keys() >= {"torchvision"}

"""Tests the locked environment against the oldest Python 3.11 that is in use: that of Debian 12."""

from importlib.metadata import distributions
from pathlib import Path

from packaging.specifiers import SpecifierSet

LOCK = Path(__file__).resolve().parents[1] / "deploy/locks/cpu.txt"
OLDEST = "3.11.2"


def test_locked_packages_accept_the_python_of_debian_12() -> None:
    locked = {line.split("==")[0].lower().replace("_", "-") for line in LOCK.read_text().splitlines()}
    needs = {
        item.name.lower().replace("_", "-"): SpecifierSet(item.metadata.get("Requires-Python") or "")
        for item in distributions()
    }
    assert len(locked & set(needs)) > 100
    assert {name: str(needs[name]) for name in locked & set(needs) if OLDEST not in needs[name]} == {}

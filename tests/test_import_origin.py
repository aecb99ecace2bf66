"""PyPI has distributions that install `trainer`, `protocol` and `services`: make sure that ours are the ones
imported."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("package", ["protocol", "services", "trainer", "rollout", "reward"])
def test_package_comes_from_the_repository(package: str) -> None:
    module = importlib.import_module(package)
    assert Path(str(module.__file__)).parent == ROOT / package

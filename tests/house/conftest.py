"""A small repository of one's own, for the tests of the house rules."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.house.source import House, read_house


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., House]:
    """Write files by path, and read them as a repository."""

    def build(files: dict[str, str]) -> House:
        for path, text in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return read_house(tmp_path)

    return build

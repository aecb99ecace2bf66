"""Tests how a path is made absolute."""

from pathlib import Path

import pytest

from protocol.paths import absolute


@pytest.mark.parametrize(
    ("path", "found"), [("a/b", "/w/a/b"), (".", "/w"), ("../a", "/a"), ("a/../../b", "/b"), ("/a/b", "/a/b")]
)
def test_a_path_becomes_absolute(path: str, found: str) -> None:
    assert absolute(Path(path), Path("/w")) == Path(found)


def test_links_are_followed_only_where_the_path_goes_up_again(tmp_path: Path) -> None:
    place = tmp_path.resolve()
    (place / "deep/inside").mkdir(parents=True)
    (place / "link").symlink_to(place / "deep/inside")
    assert absolute(Path("link/x"), place) == place / "link/x"
    assert absolute(Path("link/../x"), place) == place / "deep/x"

"""The key of the page: where it is made, that only its owner reads it, and how it comes into a URL."""

import resource
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from services.run_record.page_key import KEY_FILE, access_key, add_key

PAGE = "http://10.0.0.1:8080/"


def test_loopback_needs_no_key(tmp_path: Path) -> None:
    assert access_key("127.0.0.1", "", tmp_path) == ""
    assert list(tmp_path.iterdir()) == []


def test_key_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    key = access_key("0.0.0.0", "", tmp_path)
    assert len(key) >= 24
    assert access_key("0.0.0.0", "", tmp_path) == key
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600


def test_key_that_could_not_be_written_is_made_by_the_next_start(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(SettingsError, match="needs a key"):
            access_key("0.0.0.0", "", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
    assert len(access_key("0.0.0.0", "", tmp_path)) >= 24


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("short\n", 0o600, "at least 16"),
        ("x" * 30, 0o644, "chmod 600 '.*/my key'$"),
        (None, 0o600, "No such file"),
    ],
)
def test_bad_key_is_refused(tmp_path: Path, text: str | None, mode: int, said: str) -> None:
    path = tmp_path / "my key"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(SettingsError, match=said):
        access_key("0.0.0.0", str(path), tmp_path)


def test_directory_that_cannot_be_written_binds_nothing_off_loopback(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="needs a key"):
        access_key("0.0.0.0", "", tmp_path / "missing")


def test_a_url_gets_the_key_that_its_reader_can_read(tmp_path: Path) -> None:
    assert add_key(PAGE, "10.0.0.1", "", tmp_path) == PAGE
    key = access_key("10.0.0.1", "", tmp_path)
    assert add_key(PAGE, "10.0.0.1", "", tmp_path) == f"{PAGE}?key={key}"
    assert add_key(PAGE, "127.0.0.1", "", tmp_path) == PAGE
    (tmp_path / KEY_FILE).chmod(0o644)
    assert add_key(PAGE, "10.0.0.1", "", tmp_path) == PAGE

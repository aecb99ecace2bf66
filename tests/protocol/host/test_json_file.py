"""Files of one JSON object, and the errors about others."""

from pathlib import Path

import pytest

from protocol.errors import EngineSettingsError, SettingsError
from protocol.host.json_file import read_object


def test_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"a": [1]}')
    assert read_object(tmp_path / "x", "the file") == {"a": [1]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file or directory"),
        (b"{", "Expecting"),
        (b"\xff", "utf-8"),
        (b"[1]", "it is not a JSON object"),
    ],
)
def test_other_file_is_named_with_a_remedy(tmp_path: Path, content: bytes | None, reason: str) -> None:
    if content is not None:
        (tmp_path / "x").write_bytes(content)
    with pytest.raises(EngineSettingsError, match=f"^the file: .*{reason}.*; write it$"):
        read_object(tmp_path / "x", "the file", "; write it", EngineSettingsError)
    with pytest.raises(SettingsError):
        read_object(tmp_path / "x", "the file")

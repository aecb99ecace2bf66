"""Documents and lists of files: every changed byte is found, and named."""

import json
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from trainer.storage.checksums import (
    FILE,
    check_model_files,
    damaged_document,
    damaged_files,
    is_sealed,
    sealed,
    write_checksums,
)


@pytest.mark.parametrize("document", [b'{"a":1}', b'{\n  "a": {"b": []}\n}\n'])
def test_a_document_differs_from_what_was_sealed_after_any_change(document: bytes) -> None:
    whole = sealed(document)
    assert {key: value for key, value in json.loads(whole).items() if key != "checksum"} == json.loads(
        document
    )
    assert is_sealed(whole)
    assert not is_sealed(document)
    for place in range(len(whole)):
        for change in (0x01, 0x20, 0xFF):
            changed = bytearray(whole)
            changed[place] ^= change
            assert not is_sealed(bytes(changed)), place
    assert not is_sealed(whole[:-1])
    assert not is_sealed(whole + b"\n")


def exported(directory: Path) -> Path:
    (directory / "1_Pooling").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "1_Pooling/config.json"):
        (directory / name).write_text(f"content of {name}")
    write_checksums(directory)
    return directory


def test_every_file_of_a_directory_is_compared_and_named(tmp_path: Path) -> None:
    listed = exported(tmp_path / "model") / FILE
    (tmp_path / "model/README.md").write_text("written later, by a person")
    assert list(damaged_files(listed)) == []
    (tmp_path / "model/1_Pooling/config.json").write_text("Content of 1_Pooling/config.json")
    (tmp_path / "model/config.json").unlink()
    assert list(damaged_files(listed)) == [
        (
            tmp_path / "model/1_Pooling/config.json",
            "is damaged: it does not match its checksum in checksums.json",
        ),
        (tmp_path / "model/config.json", "cannot be read: No such file or directory"),
    ]
    listed.write_bytes(listed.read_bytes().replace(b"config", b"bonfig"))
    assert list(damaged_files(listed)) == [(listed, "is damaged: it does not match its checksum")]
    listed.unlink()
    assert list(damaged_document(listed)) == [(listed, "cannot be read: No such file or directory")]


def test_a_damaged_model_is_refused_and_one_without_a_list_is_not(tmp_path: Path) -> None:
    check_model_files(exported(tmp_path / "model"))
    weights = tmp_path / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"S")
    with pytest.raises(SettingsError, match=r"model\.safetensors is damaged: .*; restore the directory"):
        check_model_files(tmp_path / "model")
    (tmp_path / "model" / FILE).unlink()
    check_model_files(tmp_path / "model")

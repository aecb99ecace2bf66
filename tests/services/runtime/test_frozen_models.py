"""Tests that a run is held to the bytes of the models that it does not train."""

from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from services.runtime.frozen_models import FILE, RECORD_NAME, checked_digests, digest_of, record_digests
from services.settings.hub import read_record
from services.settings.resume import check_fixed, differences
from services.settings.sections import RunConfig, Settings
from trainer.roles.config import TeacherConfig


def write(directory: Path, weights: bytes) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def settings_of(tmp_path: Path, teacher: str) -> Settings:
    (tmp_path / "run").mkdir(exist_ok=True)
    return Settings(run=RunConfig(dir=str(tmp_path / "run")), teacher=TeacherConfig(path=teacher))


def test_without_frozen_models_nothing_is_written(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "")
    record_digests(settings.run_dir, checked_digests(settings))
    assert list(settings.run_dir.iterdir()) == []


def test_a_changed_model_is_refused_with_both_digests(tmp_path: Path) -> None:
    directory = write(tmp_path / "teacher", b"first")
    settings, first = settings_of(tmp_path, str(directory)), digest_of(directory)
    record_digests(settings.run_dir, checked_digests(settings))
    assert read_record(settings.run_dir / FILE, RECORD_NAME) == {"teacher": first}
    assert checked_digests(settings) == {"teacher": first}
    write(directory, b"other")
    with pytest.raises(SettingsError, match=rf"teacher\.path.*{digest_of(directory)}.*{first}"):
        checked_digests(settings)
    assert read_record(settings.run_dir / FILE, RECORD_NAME) == {"teacher": first}


def test_the_digest_is_of_names_and_contents_wherever_they_are(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", b"ab"), write(tmp_path / "two", b"ab")
    assert digest_of(one) == digest_of(two)
    (two / "model.safetensors").rename(two / "renamed.safetensors")
    assert digest_of(one) != digest_of(two)


def test_another_path_is_refused_and_offload_is_free(tmp_path: Path) -> None:
    old = settings_of(tmp_path, "/models/a")
    with pytest.raises(SettingsError, match=r"teacher\.path is \"/models/a\" .* \"/models/b\" now"):
        check_fixed(list(differences(old, replace(old, teacher=TeacherConfig(path="/models/b")))), old)
    moved = replace(old, teacher=replace(old.teacher, offload=True))
    check_fixed(list(differences(old, moved)), old)

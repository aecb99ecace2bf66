"""Tests how files and variables are read, and that names of other libraries are refused with the reason."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import SettingsError
from services.settings.load import compose_settings, dump_settings, load_settings, run_settings
from services.settings.sources import ABSENT, to_toml


@pytest.mark.parametrize("section", ["parallel", "trainer"])
@pytest.mark.parametrize("name", ABSENT)
def test_absent_setting_is_refused_with_its_reason(tmp_path: Path, section: str, name: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(None, [f'run.dir="{tmp_path}"', f"{section}.{name}=1"], environ={})
    assert f"setting {section}.{name} does not exist: {ABSENT[name]}" in str(refused.value)


def refusal(path: Path | None = None, **variables: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(str(path) if path else None, environ=variables)
    return str(caught.value)


def test_two_variables_of_one_setting_have_to_agree() -> None:
    both = {"TETHER_MAX_STALENESS": "2", "TETHER_BOUND__MAX_STALENESS": "3"}
    assert "TETHER_BOUND__MAX_STALENESS and TETHER_MAX_STALENESS both set bound.max_staleness" in refusal(
        None, **both
    )
    secret = {"TETHER_REDIS_URL": "redis://:secret@a", "TETHER_LEDGER__URL": "redis://:secret@b"}
    assert "secret" not in refusal(None, **secret)
    assert load_settings(environ=dict.fromkeys(both, "2")).bound.max_staleness == 2


def test_a_level_of_logs_that_is_none_is_refused() -> None:
    assert "TETHER_LOG_LEVEL: 'verbose' is not known; use one of DEBUG" in refusal(
        None, TETHER_LOG_LEVEL="verbose"
    )


def test_a_directory_is_answered_with_the_file_in_it(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    assert f"such as {tmp_path / 'config.toml'}" in refusal(tmp_path)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[run]\nsteps = 7\n", encoding="utf-8-sig")
    assert load_settings(str(tmp_path / "a.toml"), environ={}).run.steps == 7


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("=1", "section.key=value"),
        ("run.steps=1\ny=2", "run.steps"),
        ("RUN.steps=1", "RUN is not known; did you mean 'run'?"),
    ],
)
def test_an_override_is_one_name_and_one_value(override: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load_settings(None, [override], environ={})


@given(st.text())
def test_text_is_an_override_of_itself(text: str) -> None:
    assert compose_settings(None, [f"render.suffix={to_toml(text)}"], environ={}).render.suffix == text


def test_run_directory_may_have_any_characters(tmp_path: Path) -> None:
    run_dir = tmp_path / "run \U0001f600 \udcff\x7f"
    dump_settings(
        load_settings(None, [f"run.dir={to_toml(run_dir)}"], environ={}), tmp_path / "settings.json"
    )
    run_dir.mkdir()
    (tmp_path / "settings.json").rename(run_dir / "settings.json")
    assert run_settings(run_dir).run_dir == run_dir


@pytest.mark.parametrize("value", ["[" * 5000, "9" * 5000], ids=["nested", "long"])
def test_a_value_that_python_does_not_read_is_refused(tmp_path: Path, value: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"run.steps = {value}")
    with pytest.raises(SettingsError, match=rf"^settings file {path}: "):
        load_settings(str(path), environ={})
    with pytest.raises(SettingsError, match=r"run\.steps"):
        load_settings(overrides=[f"run.steps={value}"], environ={})

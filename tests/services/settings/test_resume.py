"""Tests what is refused, and what is listed, where a run is started again with other settings."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.codec import MAX_FRAME_BYTES
from protocol.errors import SettingsError
from rollout.engines.base import EngineConfig
from services.settings.load import FILE, dump_settings, load_settings, recorded_settings
from services.settings.resume import (
    Change,
    changes_since_last_start,
    check_drained,
    check_fixed,
    differences,
)
from services.settings.resume_rules import NOT_COMPARED, ResumeRule, rule_of
from services.settings.sections import ModelConfig, RunConfig, Settings
from tests.docs.pages import program
from trainer.config import ScratchConfig

PAGES = program("settings_pages")

SCRATCH = replace(Settings(), model=ModelConfig(scratch=ScratchConfig()))
LEAVES = [
    f"{section}.{field.name}"
    for section, kind, is_array in PAGES.sections()
    if not is_array
    for field in dataclasses.fields(kind)
    if f"{section}.{field.name}" not in {"model.scratch", *NOT_COMPARED}
]


def other(value: Any) -> Any:
    """Another value of the same type."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value - 1 if value == MAX_FRAME_BYTES else value + 1  # that default is the largest value
        case dict():
            return {**value, "x": {}}
        case tuple():
            return (*value, "x")
        case None:
            return "x"
        case "all-linear":
            return ("x",)
        case _:
            return f"{value}x"


def altered(settings: Any, path: str) -> Any:
    """The settings with another value at a dotted path."""
    name, _, rest = path.partition(".")
    value = getattr(settings, name)
    return replace(settings, **{name: altered(value, rest) if rest else other(value)})


def of_rule(*rules: ResumeRule) -> list[str]:
    return [dotted for dotted in LEAVES if rule_of(dotted)[0] in rules]


def test_every_changed_setting_is_found() -> None:
    for dotted in LEAVES:
        (change,) = differences(SCRATCH, altered(SCRATCH, dotted))
        assert (change.dotted, change.rule) == (dotted, rule_of(dotted)[0])
        assert change.old != change.new


@pytest.mark.parametrize("dotted", of_rule(ResumeRule.FIXED))
def test_a_fixed_setting_is_refused_with_both_values_and_the_reason(dotted: str) -> None:
    new = altered(SCRATCH, dotted)
    (change,) = differences(SCRATCH, new)
    with pytest.raises(SettingsError) as refused:
        check_fixed([change], new)
    told, (old_text, new_text) = str(refused.value), str(change).removeprefix(f"{dotted} ").split(" -> ")
    assert f"setting {dotted} is {old_text} in the run and {new_text} now" in told
    assert rule_of(dotted)[1] in told
    assert str(new.run_dir) in told


def test_no_other_setting_is_refused() -> None:
    for dotted in LEAVES:
        if rule_of(dotted)[0] is not ResumeRule.FIXED:
            new = altered(SCRATCH, dotted)
            check_fixed(list(differences(SCRATCH, new)), new)


@pytest.mark.parametrize("dotted", of_rule(ResumeRule.DRAINED))
def test_a_drained_setting_is_refused_while_samples_wait(dotted: str) -> None:
    changes = list(differences(SCRATCH, altered(SCRATCH, dotted)))
    check_drained(changes, 0)
    with pytest.raises(SettingsError, match=rf"setting {dotted} is .* in the run and .* now: .*3 groups"):
        check_drained(changes, 3)


@pytest.mark.parametrize(
    ("before", "now", "is_refused"),
    [(1e-4, 1e-4, True), (1e-4, 1e-5, True), (0, 1e-4, False), (1e-4, 0, False)],
)
def test_another_head_is_refused_while_it_is_trained(before: float, now: float, is_refused: bool) -> None:
    old, new = (
        replace(SCRATCH, engine=EngineConfig(drafts="model", draft_model=head, draft_lr=lr))
        for head, lr in (("/a", before), ("/b", now))
    )
    changes = list(differences(old, new))
    if not is_refused:
        return check_fixed(changes, new)
    with pytest.raises(
        SettingsError, match=r'engine\.draft_model is "/a" in the run and "/b" now.*checkpoints'
    ):
        check_fixed(changes, new)


def test_another_kind_of_model_is_refused() -> None:
    new = replace(Settings(), model=ModelConfig(path="/m"))
    changes = list(differences(SCRATCH, new))
    assert [change.dotted for change in changes] == ["model.path", "model.scratch"]
    with pytest.raises(SettingsError, match=r"setting model\.scratch is \{ .* \} in the run and not set now"):
        check_fixed(changes, new)


def test_a_change_is_told_with_both_values() -> None:
    assert str(Change("optimizer.lr", 1e-5, 5e-6)) == "optimizer.lr 1e-05 -> 5e-06"
    assert str(Change("weights.host", "", "a")) == 'weights.host "" -> "a"'


def test_paths_to_the_same_file_are_equal(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    old, new = (replace(Settings(), model=ModelConfig(path=f"{tmp_path}/{n}")) for n in ("there", "link"))
    assert list(differences(old, new)) == []


# -- the settings of the last start
def test_a_new_run_has_changed_nothing(tmp_path: Path) -> None:
    assert changes_since_last_start(replace(Settings(), run=RunConfig(dir=str(tmp_path)))) == ()


def test_a_run_that_is_started_again_as_it_was_has_changed_nothing(tmp_path: Path) -> None:
    settings = load_settings(None, [f"run.dir={tmp_path}", "model.scratch.seed=1"], environ={})
    with_url = replace(settings, ledger=replace(settings.ledger, url="redis://h:1/0"))
    dump_settings(with_url, tmp_path / FILE)
    assert changes_since_last_start(with_url) == []


def test_setting_allowed_at_the_last_start_can_still_be_compared(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"model": {"path": "m", "scratch": {}}}')
    recorded = recorded_settings(tmp_path)
    assert recorded is not None
    assert recorded.model.path == "m"


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{")
    with pytest.raises(SettingsError, match=f"{tmp_path}/{FILE}, the settings of the last start"):
        recorded_settings(tmp_path)


def test_settings_of_a_run_that_was_moved_do_not_say_which_run_is_meant(tmp_path: Path) -> None:
    old, moved = tmp_path / "old", tmp_path / "moved"
    for directory in (old, moved):
        directory.mkdir()
        (directory / "spool.sqlite").touch()
        dump_settings(replace(Settings(), run=RunConfig(dir=str(old))), directory / FILE)
    assert load_settings(str(old / FILE), environ={}).run_dir == old
    with pytest.raises(SettingsError, match=f"moved or copied to {moved}: say which one is"):
        load_settings(str(moved / FILE), environ={})
    for damaged in ('{"run": "x"}', '{"run": {"dir": 1}}'):
        (moved / FILE).write_text(damaged)
        with pytest.raises(SettingsError, match="run"):
            load_settings(str(moved / FILE), environ={})
    dump_settings(replace(Settings(), run=RunConfig(dir=str(old))), moved / FILE)
    for meant in (old, moved):
        assert load_settings(str(moved / FILE), [f"run.dir={meant}"], {}).run_dir == meant
        assert load_settings(str(moved / FILE), [], {"TETHER_RUN_DIR": str(meant)}).run_dir == meant

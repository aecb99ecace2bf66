"""Tests the table of what a resume may change."""

import pytest

from services.settings.resume_rules import (
    DEFAULT,
    NOT_COMPARED,
    RULES,
    ResumeRule,
    rule_of,
)
from tests.docs.pages import program

PAGES = program("settings_pages")

SECTIONS = {dotted for dotted, _, _ in PAGES.sections()}
SETTINGS = {
    f"{dotted}.{name}"
    for dotted, kind, is_array in PAGES.sections()
    if not is_array
    for name in kind.__dataclass_fields__  # type: ignore[attr-defined]
}


def test_the_page_is_up_to_date() -> None:
    assert PAGES.RESUME.read_text() == PAGES.render_rules(), "run `python docs/settings_pages.py`"


def test_every_row_names_a_setting_or_a_section() -> None:
    assert {*RULES, *NOT_COMPARED} <= SETTINGS | SECTIONS


def test_every_row_has_a_reason() -> None:
    assert all(reason for _, reason in RULES.values())


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ("model.scratch.hidden_size", ResumeRule.FIXED),
        ("model.path", ResumeRule.FIXED),
        ("prompts.path", ResumeRule.FREE),
        ("prompts.seed", ResumeRule.FIXED),
        ("bound.max_attempts", ResumeRule.FREE),
        ("optimizer.lr", ResumeRule.REPEATED),
        ("cluster.nodes", ResumeRule.REPEATED),
        ("weights.transport", ResumeRule.REPEATED),
        ("weights.backend", ResumeRule.REPEATED),
        ("weights.delta", ResumeRule.REPEATED),
        ("weights.bucket_mb", DEFAULT[0]),
        ("bus.host", DEFAULT[0]),
    ],
)
def test_a_setting_has_its_own_rule_or_that_of_its_section(setting: str, rule: ResumeRule) -> None:
    assert rule_of(setting)[0] is rule

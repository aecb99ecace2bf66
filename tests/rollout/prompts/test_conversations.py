"""Conversations as prompts: what a template would drop, or show as an answer, is refused with its row."""

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SettingsError
from rollout.prompts.base import PromptConfig
from rollout.prompts.registry import make_source


def source(path: Path, *messages: Any) -> PromptConfig:
    rows = [{"prompt": [{"role": role, "content": text} for role, text in messages], "answer": "4"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptConfig(source="jsonl", path=str(path))


def test_turns_of_users_assistants_and_tools_are_kept(tmp_path: Path) -> None:
    said = (
        ("developer", "Brief."),
        ("user", "2+2?"),
        ("assistant", "Sure?"),
        ("tool", "4"),
        ("user", "Yes."),
    )
    assert make_source(source(tmp_path / "a.jsonl", *said)).at(0).messages == said


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (
            [("usr", "2+2?")],
            "a message has the role 'usr', which chat templates leave out; they know ",
        ),
        ([("user", "2+2?"), ("assistant", "4")], "the conversation ends with what the assistant said"),
    ],
)
def test_a_conversation_that_a_template_would_not_show_rightly_is_refused(
    tmp_path: Path, messages: list[Any], why: str
) -> None:
    with pytest.raises(SettingsError, match=f"a.jsonl:1: {why}"):
        make_source(source(tmp_path / "a.jsonl", *messages))

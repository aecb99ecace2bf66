"""Templates and answer patterns: what they make of a row, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from rollout.prompts.base import Prompt, PromptConfig
from rollout.prompts.registry import make_source
from rollout.prompts.row_fields import compile_pattern, fill_template, parse_template
from tests.data_sets import sums

GSM8K = PromptConfig(prompt_field="question", answer_pattern="#### (.+)", shuffle=False)


def written(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def only(config: PromptConfig) -> Prompt:
    return make_source(config).at(0)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{question}", "2+2?"),
        ("Level {level}: {question}\nGo.", "Level 3: 2+2?\nGo."),
        ("{question} in \\boxed{{}}", "2+2? in \\boxed{}"),
        ("the same for all", "the same for all"),
    ],
)
def test_a_template_takes_fields_of_the_row(template: str, text: str) -> None:
    assert fill_template(parse_template(template), {"question": "2+2?", "level": 3}, "here") == text


@pytest.mark.parametrize(
    "template", ["{", "}", "{}", "{0}", "{a.b}", "{a[0]}", "{a!r}", "{a:>3}", "\\boxed{ x }"]
)
def test_a_template_with_anything_else_in_braces_is_refused(template: str) -> None:
    with pytest.raises(SettingsError, match=r"setting prompts\.template: .*write \{\{ and \}\} for braces"):
        parse_template(template)


def test_a_template_names_fields_that_rows_have(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [{"question": "2+2?", "answer": "4", "steps": ["a"], "hint": None}])
    for template, why in (
        ("{qestion}", "names the field 'qestion', which is not one of answer, hint, question, steps"),
        ("{steps}", "the field 'steps' of prompts.template is list"),
        ("{hint}", "the field 'hint' of prompts.template is NoneType"),
    ):
        with pytest.raises(SettingsError, match=f"a.jsonl:1: .*{why}"):
            make_source(PromptConfig(path=path, template=template))


def test_with_a_template_all_fields_are_metadata(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [{"prompt": "2+2", "answer": "4", "unit": "apples"}])
    prompt = only(PromptConfig(path=path, template="{prompt} {unit}?"))
    assert prompt.text == "2+2 apples?"
    assert prompt.metadata == {"prompt": "2+2", "answer": "4", "unit": "apples"}


def test_a_pattern_finds_the_answer_in_its_field(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", sums(600)[-1:])  # type: ignore[arg-type]
    assert only(replace(GSM8K, path=path)).metadata["answer"] == "1,199"
    boxed = written(tmp_path / "b.jsonl", [{"problem": "x?", "solution": r"so \boxed{\frac12}. Done"}])
    config = PromptConfig(
        path=boxed, prompt_field="problem", answer_field="solution", answer_pattern=r"\\boxed\{(.+)\}"
    )
    assert only(config).metadata == {"solution": r"so \boxed{\frac12}. Done", "answer": r"\frac12"}


def test_rows_without_an_answer_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    rows = [*sums(5), {"question": "?", "answer": "no idea"}, {"question": "?", "answer": "####  "}]
    path = written(tmp_path / "a.jsonl", rows)
    with pytest.raises(
        SettingsError, match=r"2 of 7 rows have no answer .*'#### \(\.\+\)'.*a\.jsonl:6: 'no idea'"
    ):
        make_source(replace(GSM8K, path=path))


@pytest.mark.parametrize(
    ("pattern", "why"), [("(", "missing \\)"), ("####", "has 0 groups"), ("(a)|(b)", "has 2 groups")]
)
def test_a_pattern_has_one_group(pattern: str, why: str) -> None:
    with pytest.raises(SettingsError, match=rf"setting prompts\.answer_pattern: .*{why}"):
        compile_pattern(pattern)


def test_a_pattern_needs_a_field_to_search(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", sums(1))  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"answer_pattern: set prompts\.answer_field"):
        make_source(replace(GSM8K, path=path, answer_field=""))

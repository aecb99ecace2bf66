"""Sources by name, and settings that a source does not use: they are refused where they are given."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SettingsError
from rollout.prompts.base import PromptConfig, source_settings
from rollout.prompts.held_out import held_out_sets
from rollout.prompts.named_source import HeldOutConfig, MixtureConfig
from rollout.prompts.registry import make_source

SUMS = PromptConfig(source="reasoning_gym", families=("chain_sum",))


def rows(path: Path, first: int = 0) -> str:
    lines = [json.dumps({"question": f"q{i}", "answer": str(i)}) + "\n" for i in range(first, first + 5)]
    path.write_text("".join(lines))
    return str(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("split", "validation"), ("subset", "main"), ("revision", "v2"), ("families", ("chain_sum",)),
        ("params", {"chain_sum": {"min_terms": 2}}),
    ],
)  # fmt: skip
def test_setting_unused_by_a_file_of_lines_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    config = PromptConfig(path=rows(tmp_path / "a.jsonl"), prompt_field="question", split="train", params={})
    assert make_source(replace(config, passes=1)).size == 5
    with pytest.raises(SettingsError) as refused:
        make_source(replace(config, **{name: value}))
    assert str(refused.value) == (
        f"setting prompts.{name}: {value!r}, but prompts.source 'jsonl' does not use it; remove the setting"
    )


@pytest.mark.parametrize("source", ["reasoning_gym", "textarena"])
@pytest.mark.parametrize("name", ["path", "prompt_field", "answer_field", "split"])
def test_setting_unused_by_a_generator_of_prompts_is_refused(source: str, name: str) -> None:
    with pytest.raises(
        SettingsError, match=rf"prompts\.{name}: 'x', but prompts\.source '{source}' does not"
    ):
        make_source(replace(SUMS, source=source, **{name: "x"}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("families", ("gcd",)), ("params", {"gcd": {}})])
def test_setting_unused_by_a_data_set_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    config = PromptConfig(source="hf", path=rows(tmp_path / "a.jsonl"), prompt_field="question")
    with pytest.raises(
        SettingsError, match=rf"prompts\.{name}: .*'gcd'.*, but prompts\.source 'hf' does not"
    ):
        make_source(replace(config, **{name: value}))


def test_a_source_of_a_mixture_may_inherit_what_it_does_not_use_but_not_give_it(tmp_path: Path) -> None:
    of_rows = MixtureConfig(name="rows")
    sums = MixtureConfig(name="sums", source="reasoning_gym", families=("chain_sum",))
    mixture = PromptConfig(path=rows(tmp_path / "a.jsonl"), prompt_field="question", mixture=(of_rows, sums))
    assert make_source(mixture).at(0).text
    inherited = source_settings(mixture, sums)
    assert (inherited.path, inherited.prompt_field) == ("", "question")  # streams keep their fingerprints
    given = replace(mixture, mixture=(of_rows, replace(sums, prompt_field="question")))
    with pytest.raises(
        SettingsError, match=r"source sums of prompts\.mixture: setting prompts\.prompt_field"
    ):
        make_source(given)


def test_a_held_out_set_may_inherit_what_it_does_not_use_but_not_give_it(tmp_path: Path) -> None:
    config = HeldOutConfig(
        name="lines", source="jsonl", path=rows(tmp_path / "a.jsonl"), prompt_field="question"
    )
    found = held_out_sets(make_source(SUMS), SUMS, (config,), 200)
    assert len(found["lines"]) == 5
    with pytest.raises(SettingsError, match=r"eval set lines: setting prompts\.split: 'test', but"):
        held_out_sets(make_source(SUMS), SUMS, (replace(config, split="test"),), 200)

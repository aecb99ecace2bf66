"""Held-out sets: what a set takes from [prompts], what it leaves out, and what is refused."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from rollout.prompts.base import PromptConfig
from rollout.prompts.held_out import held_out_sets
from rollout.prompts.named_source import HeldOutConfig
from rollout.prompts.registry import make_source


def file(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"question": text, "answer": "1"}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def prompts(tmp_path: Path) -> PromptConfig:
    return PromptConfig(
        path=file(tmp_path / "train.jsonl", [f"q{i}" for i in range(10)]), prompt_field="question"
    )


def texts(prompts: PromptConfig, *sets: HeldOutConfig, limit: int = 200) -> Mapping[str, list[str]]:
    found = held_out_sets(make_source(prompts), prompts, sets, limit)
    assert all(prompt.index == -1 for each in found.values() for prompt in each)
    return {name: [prompt.text for prompt in each] for name, each in found.items()}


def test_without_sets_there_is_the_one_of_the_prompts(tmp_path: Path, prompts: PromptConfig) -> None:
    assert texts(prompts) == {"held_out": []}
    held = PromptConfig(path=prompts.path, prompt_field="question", held_out=2)
    assert texts(held) == {"held_out": ["q8", "q9"]}
    assert texts(held, limit=1) == {"held_out": ["q8"]}


def test_a_set_is_read_as_the_prompts_are_without_what_is_trained_on(
    tmp_path: Path, prompts: PromptConfig
) -> None:
    path = file(tmp_path / "test.jsonl", ["a", "q3", "b", "a"])
    assert texts(prompts, HeldOutConfig(name="test", path=path)) == {"test": ["a", "b"]}


def test_a_smaller_set_is_the_same_choice_from_everywhere_in_the_file(
    tmp_path: Path, prompts: PromptConfig
) -> None:
    path = file(tmp_path / "test.jsonl", [f"t{i:03}" for i in range(300)])
    sets = (HeldOutConfig(name="few", path=path, limit=20), HeldOutConfig(name="more", path=path))
    first = texts(prompts, *sets, limit=100)
    assert first == texts(prompts, *sets, limit=100)
    assert {name: len(each) for name, each in first.items()} == {"few": 20, "more": 100}
    assert all(each == sorted(each) for each in first.values())
    assert first["few"][0] < "t100" < "t200" < first["few"][-1]


def test_a_set_that_is_generated_has_other_questions_than_training() -> None:
    prompts = PromptConfig(source="reasoning_gym", families=("chain_sum",), count=50, held_out=3)
    found = texts(prompts, HeldOutConfig(name="gcd", families=("gcd",)), limit=7)
    assert {name: len(each) for name, each in found.items()} == {"held_out": 3, "gcd": 7}
    assert not set(found["gcd"]) & set(make_source(prompts).trained_texts())


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["a", ""], r"eval\.sets\.1\.name: '' must be"),
        (["a", "A b"], r"eval\.sets\.1\.name: 'A b' must be"),
        (["a", "a"], r"eval\.sets\.1\.name: 'a' is taken"),
        (["held_out"], r"eval\.sets\.0\.name: 'held_out' is taken"),
    ],
)
def test_names_of_sets_are_checked(tmp_path: Path, prompts: PromptConfig, names: list[str], why: str) -> None:
    path = file(tmp_path / "test.jsonl", ["a"])
    with pytest.raises(SettingsError, match=why):
        texts(prompts, *(HeldOutConfig(name=name, path=path) for name in names))


def test_a_set_that_cannot_be_used_is_named(tmp_path: Path, prompts: PromptConfig) -> None:
    with pytest.raises(SettingsError, match="eval set test: all 10 prompts are also trained on"):
        texts(prompts, HeldOutConfig(name="test"))
    with pytest.raises(SettingsError, match=r"eval set test: .*/nowhere"):
        texts(prompts, HeldOutConfig(name="test", path=str(tmp_path / "nowhere")))


def test_a_conversation_repeats_another_only_if_all_of_it_does(tmp_path: Path) -> None:
    def row(question: str, system: str = "Be brief.") -> str:
        said = [("system", system), ("user", question), ("assistant", "Sure?"), ("user", "Yes.")]
        return json.dumps({"prompt": [{"role": role, "content": text} for role, text in said], "answer": "1"})

    rows = [row("1+1?"), row("2+2?"), row("3+3?"), row("1+1?", "Be long.")]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(rows))
    source = make_source(PromptConfig(path=str(path), held_out=2))
    assert [prompt.messages[1][1] for prompt in source.held_out()] == ["3+3?"]


def test_the_fingerprint_says_where_the_held_out_prompts_begin(tmp_path: Path) -> None:
    rows = [f"q{i}" for i in range(10)]
    base = PromptConfig(path=file(tmp_path / "a", rows), prompt_field="question", held_out=4)
    longer = replace(
        base, path=file(tmp_path / "b", [*rows, "q0"])
    )  # q6 is trained, too, and q0 is not scored
    assert texts(longer) == {"held_out": ["q7", "q8", "q9"]}
    six, seven = (
        replace(
            base,
            path=file(tmp_path / f"train{n}", rows[:n]),
            held_out_path=file(tmp_path / f"held{n}", rows[n:]),
        )
        for n in (6, 7)
    )
    for one, other in ((base, longer), (six, seven)):
        assert make_source(one).fingerprint != make_source(other).fingerprint

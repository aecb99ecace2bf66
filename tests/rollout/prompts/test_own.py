"""Tests prompt sources of the user: rows of a function, and a stream of its own."""

from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from rollout.prompts.base import PromptConfig, source_settings
from rollout.prompts.held_out import held_out_sets
from rollout.prompts.named_source import HeldOutConfig, MixtureConfig
from rollout.prompts.registry import make_source

MODULE = """
from rollout.prompts.base import Prompt

def sums(*, most=9):
    for a in range(most):
        yield {"prompt": f"{a}+1=", "answer": str(a + 1), "level": a}

def broken():
    yield {"prompt": "a", "answer": "b"}
    yield {"prompt": "a", "answer": "b"[1]}

def nothing():
    yield {"question": "a"}

class Squares:
    size = None
    def __init__(self, config, *, first=0):
        self.first = first
        self.fingerprint = f"{config.seed + first:016x}"
    def at(self, index):
        n = self.first + index
        return Prompt(f"{n}*{n}=", metadata={"answer": str(n * n)}, index=index)
    def held_out(self):
        return []
    def trained_texts(self):
        return ()

class Half:
    def __init__(self, config): ...

class Given(Squares):
    def __init__(self, config, **members):
        super().__init__(config)
        vars(self).update(members)
    def at(self, index):
        return eval(self.prompt)
    def held_out(self):
        return self.kept
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_prompts_of_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def own(name: str, **options: object) -> PromptConfig:
    return PromptConfig(source=f"own_prompts_of_test:{name}", options=options)


def test_rows_of_a_function_are_ordered_and_held_out_as_rows_of_a_file() -> None:
    config = replace(own("sums", most=6), held_out=2, passes=2)
    source = make_source(config)
    assert source.size == 8
    assert [p.text for p in source.held_out()] == ["4+1=", "5+1="]
    assert {source.at(i).text for i in range(4)} == {f"{a}+1=" for a in range(4)}
    assert source.at(0).metadata["answer"] == str(source.at(0).metadata["level"] + 1)


def test_the_fingerprint_is_of_the_rows_and_not_of_the_options() -> None:
    base = make_source(own("sums")).fingerprint
    assert make_source(own("sums", most=9)).fingerprint == base
    assert make_source(own("sums", most=8)).fingerprint != base


def test_a_class_is_a_stream_of_its_own() -> None:
    source = make_source(replace(own("Squares", first=3), seed=5))
    assert (source.size, source.fingerprint) == (None, f"{8:016x}")
    assert source.at(2).text == "5*5="


def test_a_source_of_the_user_is_mixed_and_evaluated_on() -> None:
    few = MixtureConfig(name="few", source="own_prompts_of_test:sums", options={"most": 3})
    squares = MixtureConfig(name="squares", source="own_prompts_of_test:Squares", weight=3)
    mixed = make_source(PromptConfig(mixture=(few, squares)))
    assert {mixed.at(i).metadata["source"] for i in range(20)} == {"few", "squares"}
    sets = (HeldOutConfig(name="more", source="own_prompts_of_test:sums", options={"most": 5}),)
    found = held_out_sets(make_source(own("sums", most=2)), own("sums", most=2), sets, 9)
    assert [p.text for p in found["more"]] == ["2+1=", "3+1=", "4+1="]
    assert source_settings(own("sums", most=2), sets[0]).options == {"most": 5}


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "sums",
            {"least": 1},
            "got an unexpected keyword argument 'least'; it is called with prompts.options",
        ),
        ("broken", {}, r"own_prompts_of_test.py:10: IndexError: string index out of range"),
        ("nothing", {}, r"own_prompts_of_test:nothing: row 0: no field 'prompt', it has question"),
        ("Half", {}, "it has no fingerprint; write all of fingerprint, size, at, held_out, trained_texts"),
        ("Squares", {"last": 1}, "it is called with the section .prompts. and prompts.options"),
        ("sum", {}, "has no 'sum'; did you mean 'sums'"),
    ],
)
def test_a_source_of_the_user_that_does_not_fit_is_refused(
    name: str, options: dict[str, object], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        make_source(own(name, **options))


def test_settings_that_only_others_use_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"setting prompts\.path: 'x\.jsonl', but prompts\.source 'own_"):
        make_source(replace(own("sums"), path="x.jsonl"))
    with pytest.raises(SettingsError, match=r"setting prompts\.options: .* 'reasoning_gym' does not use it"):
        make_source(PromptConfig(source="reasoning_gym", families=("chain_sum",), options={"a": 1}))


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"size": "10"}, "size is '10', it must be a whole number of prompts"),
        ({"size": 0}, "size is '0', it must be a whole number of prompts, at least 1, or None"),
        ({"fingerprint": 5}, "fingerprint is '5', it must be text"),
    ],
)
def test_a_stream_whose_members_do_not_fit_is_refused(members: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=f"own_prompts_of_test.py: {words}"):
        make_source(own("Given", **members))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("'2+2='", r"at\(3\) is '2\+2=', it must be a Prompt"),
        ("Prompt(4)", r"at\(3\) is .*, it must be a Prompt with a text"),
        ("Prompt('a', ({'role': 'user', 'content': 'a'},))", r"at\(3\).messages is .* pairs"),
        ("Prompt('a', (), None)", r"at\(3\).metadata is 'None', it must be a mapping"),
        ("Prompt('a', (), {'answer': object()})", r"prompt 'a' has metadata 'answer' that cannot be sent"),
        ("Prompt('a', (), {'b': ['\\ud800']})", r"has metadata 'b' that cannot be sent: .*surrogates"),
        ("Prompt('a\\ud800')", r"at\(3\): prompt 'a.ud800' has text that cannot be sent: .*surrogates"),
        ("Prompt('a', (('user', '\\ud800'),))", r"prompt 'a' has messages that cannot be sent: .*surrogates"),
        ("[][index]", "IndexError: list index out of range"),
    ],
)
def test_a_stream_that_gives_no_prompt_is_named(prompt: str, words: str) -> None:
    source = make_source(own("Given", prompt=prompt))
    with pytest.raises(SettingsError, match=f"own_prompts_of_test.*{words}"):
        source.at(3)


def test_a_stream_that_holds_out_no_prompts_is_named() -> None:
    with pytest.raises(SettingsError, match=r"held_out\(\) is 'None', it must be a list"):
        make_source(own("Given", kept=None)).held_out()
    with pytest.raises(SettingsError, match=r"held_out\(\) is 'a', it must be a Prompt"):
        make_source(own("Given", kept=["a"])).held_out()


def test_the_prompts_of_a_stream_have_their_places_and_messages_in_pairs() -> None:
    source = make_source(own("Given", prompt="Prompt('a', [['user', 'a']])", size=4))
    assert (source.at(3).index, source.at(3).messages) == (3, (("user", "a"),))
    with pytest.raises(IndexError, match="prompt 4 is outside the stream of 4"):
        source.at(4)


def test_a_stream_without_end_is_no_held_out_set() -> None:
    sets = (HeldOutConfig(name="more", source="own_prompts_of_test:Squares"),)
    with pytest.raises(
        SettingsError, match=r"eval set more: own_prompts_of_test:Squares has no end .* a size"
    ):
        held_out_sets(make_source(own("sums")), own("sums"), sets, 9)

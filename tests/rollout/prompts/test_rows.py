"""Prompts from files: order, held-out prompts, fingerprints, and errors of bad rows."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import SettingsError
from rollout.prompts.base import Order, Prompt, PromptConfig
from rollout.prompts.held_out import held_out_sets
from rollout.prompts.named_source import HeldOutConfig, MixtureConfig
from rollout.prompts.registry import make_source
from rollout.prompts.rows import compile_pattern, fill_template, parse_template
from tests.data_sets import sums

EXAMPLES = Path(__file__).parents[3] / "deploy" / "examples"


def written(path: Path, rows: list[object]) -> PromptConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptConfig(path=str(path))


def numbered(count: int) -> list[object]:
    return [{"prompt": f"q{i}", "answer": str(i), "level": i % 3} for i in range(count)]


def test_a_pass_holds_every_prompt_once_and_the_next_pass_another_order(tmp_path: Path) -> None:
    source = make_source(replace(written(tmp_path / "a.jsonl", numbered(50)), passes=3))
    assert source.size == 150
    passes = [[source.at(50 * k + i).text for i in range(50)] for k in range(3)]
    assert all(sorted(one) == sorted(f"q{i}" for i in range(50)) for one in passes)
    assert len({tuple(one) for one in passes}) == 3
    with pytest.raises(IndexError, match="prompt 150"):
        source.at(150)


def test_at_is_a_pure_function_of_file_and_index(tmp_path: Path) -> None:
    config = written(tmp_path / "a.jsonl", numbered(30))
    first, second = make_source(config), make_source(config)
    indices = [1000, 0, 7, 29, 30, 1000, 0]
    assert [first.at(i) for i in indices] == [second.at(i) for i in indices]
    assert first.at(1000) == second.at(1000)
    assert first.at(12).index == 12
    assert first.size is None


def test_without_shuffling_the_order_is_that_of_the_file(tmp_path: Path) -> None:
    source = make_source(replace(written(tmp_path / "a.jsonl", numbered(5)), shuffle=False))
    assert [source.at(i).text for i in range(7)] == ["q0", "q1", "q2", "q3", "q4", "q0", "q1"]
    assert source.at(3).metadata == {"answer": "3", "level": 0}


def test_held_out_prompts_are_the_last_ones_and_never_in_the_stream(tmp_path: Path) -> None:
    source = make_source(replace(written(tmp_path / "a.jsonl", numbered(20)), held_out=6, passes=2))
    assert [p.text for p in source.held_out()] == [f"q{i}" for i in range(14, 20)]
    assert source.size == 28
    assert {source.at(i).text for i in range(28)} == {f"q{i}" for i in range(14)}


def test_a_held_out_prompt_that_repeats_a_trained_one_is_left_out(tmp_path: Path) -> None:
    rows = [
        *numbered(10),
        {"prompt": "q3", "answer": "3"},
        {"prompt": "new", "answer": "1"},
        {"prompt": "new", "answer": "1"},
    ]
    source = make_source(replace(written(tmp_path / "a.jsonl", rows), held_out=3))
    assert [p.text for p in source.held_out()] == ["new"]
    with pytest.raises(SettingsError, match="all 1 held-out prompts also occur in training"):
        make_source(
            replace(
                written(tmp_path / "b.jsonl", [*numbered(3), {"prompt": "q0", "answer": "0"}]), held_out=1
            )
        )


def test_held_out_prompts_may_have_a_file_of_their_own(tmp_path: Path) -> None:
    other = written(
        tmp_path / "held.jsonl",
        [{"prompt": "h", "answer": "1"}, {"prompt": "q1", "answer": "1"}, {"prompt": "i", "answer": "2"}],
    )
    config = replace(written(tmp_path / "a.jsonl", numbered(4)), held_out_path=other.path, passes=1)
    assert [p.text for p in make_source(config).held_out()] == ["h", "i"]
    assert [p.text for p in make_source(replace(config, held_out=1)).held_out()] == ["h"]
    assert make_source(config).size == 4


def test_the_fingerprint_changes_with_content_and_order_but_not_with_the_path(tmp_path: Path) -> None:
    config = written(tmp_path / "a.jsonl", numbered(9))
    same = written(tmp_path / "b.jsonl", numbered(9))
    changed = written(tmp_path / "c.jsonl", [*numbered(8), {"prompt": "q8", "answer": "nine"}])
    base = make_source(config).fingerprint
    assert make_source(same).fingerprint == base
    others = [
        changed,
        replace(config, seed=1),
        replace(config, shuffle=False),
        replace(config, held_out=2),
        replace(config, passes=2),
    ]
    assert len({base, *(make_source(c).fingerprint for c in others)}) == 1 + len(others)


def test_a_fingerprint_is_that_of_earlier_releases(tmp_path: Path) -> None:
    demo = PromptConfig(path=str(EXAMPLES / "max3/prompts.jsonl"), held_out=200)
    assert make_source(demo).fingerprint == "90e54be16a3fe4d2"
    rows = [{"q": f"q{i}", "a": str(i), "level": i % 3} for i in range(9)]
    path = written(tmp_path / "a.jsonl", rows).path  # type: ignore[arg-type]
    named = PromptConfig(source="hf", path=path, prompt_field="q", answer_field="a", seed=3)
    assert make_source(named).fingerprint == "2ed19b42d2d5d787"


def test_a_prompt_may_be_a_conversation_and_fields_may_have_other_names(tmp_path: Path) -> None:
    asked = {"role": "user", "content": "2+2?", "tool_calls": None, "id": 3}
    conversation = [{"role": "system", "content": "Be brief."}, asked]
    config = written(
        tmp_path / "a.jsonl", [{"chat": conversation, "solution": "4", "tests": ["assert True"]}]
    )
    prompt = make_source(replace(config, prompt_field="chat", answer_field="solution")).at(0)
    assert prompt.text == "2+2?"
    assert prompt.messages == (("system", "Be brief."), ("user", "2+2?"))
    assert prompt.metadata == {"solution": "4", "answer": "4", "tests": ["assert True"]}
    assert "answer" not in make_source(replace(config, prompt_field="chat", answer_field="")).at(0).metadata


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("\xff", "not JSON"),
        ("[1]", 'expected an object .* read by prompts.source "hf"'),
        ('{"prompt": "x", "answer": null}', "the field 'answer' is null"),
        ('{"answer": "1"}', "no field 'prompt', it has answer"),
        ('{"prompt": "x"}', "no field 'answer', it has prompt"),
        ('{"prompt": "", "answer": "1"}', "is empty"),
        ('{"prompt": 3, "answer": "1"}', "expected text or a list of messages"),
        ('{"prompt": [{"role": "user"}], "answer": "1"}', "expected text or a list of messages"),
        ('{"prompt": [], "answer": "1"}', "expected text or a list of messages"),
        ('{"prompt": [{"role": "a", "content": "", "tool_calls": [1]}], "answer": ""}', "has tool_calls"),
    ],
)
def test_a_bad_line_is_named_with_the_reason(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "fine", "answer": "1"}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(SettingsError, match=f"bad.jsonl:3: .*{why}"):
        make_source(PromptConfig(path=str(path)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"path": ""}, "prompts.path"),
        ({"path": "/nowhere/a.jsonl"}, "does not exist"),
        ({"held_out_path": "/nowhere"}, "prompts.held_out_path"),
        ({"held_out": 3}, "leave 0 to train on"),
        ({"count": 4}, "leave 3 to train on"),
        ({"source": "jsonnl"}, "did you mean 'jsonl'"),
    ],
)
def test_wrong_settings_say_what_to_do(tmp_path: Path, change: dict[str, object], why: str) -> None:
    config = written(tmp_path / "a.jsonl", numbered(3))
    with pytest.raises(SettingsError, match=why):
        make_source(replace(config, **change))  # type: ignore[arg-type]


def test_a_saved_data_set_and_its_files_give_the_same_stream(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_list([{"prompt": f"q{i}", "answer": str(i)} for i in range(12)])
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "splits")
    (tmp_path / "files").mkdir()
    table.to_parquet(tmp_path / "files" / "a.parquet")
    (tmp_path / "lines.json").write_text("".join(json.dumps(row) + "\n" for row in table))
    sources = [
        make_source(PromptConfig(source="hf", path=str(tmp_path / p), held_out=2))
        for p in ("saved", "splits", "files", "lines.json")
    ]
    texts = [[source.at(i).text for i in range(20)] for source in sources]
    assert all(one == texts[0] for one in texts)
    assert [p.text for p in sources[0].held_out()] == ["q10", "q11"]
    assert (
        make_source(PromptConfig(source="hf", path=str(tmp_path / "splits"), split="test")).at(5).text == "q0"
    )
    with pytest.raises(SettingsError, match="did you mean 'train'"):
        make_source(PromptConfig(source="hf", path=str(tmp_path / "splits"), split="trian"))
    with pytest.raises(SettingsError, match="no field 'question'"):
        make_source(PromptConfig(source="hf", path=str(tmp_path / "saved"), prompt_field="question"))
    for whole in ("saved", "lines.json"):
        with pytest.raises(SettingsError, match=rf"prompts\.split: 'test', but .*{whole} has no splits"):
            make_source(PromptConfig(source="hf", path=str(tmp_path / whole), split="test"))
    of_test = PromptConfig(source="hf", path=str(tmp_path / "splits"), split="test")
    (tmp_path / "held.json").write_text(json.dumps({"prompt": "other", "answer": "1"}) + "\n")
    held = make_source(replace(of_test, held_out_path=str(tmp_path / "held.json"))).held_out()
    assert [prompt.text for prompt in held] == ["other"]  # a file for evaluation needs no split


def test_hf_refuses_what_is_not_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    with pytest.raises(SettingsError, match=r"a\.parquet"):
        make_source(PromptConfig(source="hf", path=str(tmp_path / "a.parquet")))
    (tmp_path / "b.txt").touch()
    with pytest.raises(SettingsError, match="must be a Parquet or JSON file"):
        make_source(PromptConfig(source="hf", path=str(tmp_path / "b.txt")))


@given(count=st.integers(1, 40), seed=st.integers(0, 2**30), number=st.integers(0, 1000))
def test_every_pass_is_a_permutation(count: int, seed: int, number: int) -> None:
    order = Order(count, seed=seed, shuffle=True, passes=0)
    assert sorted(order[number * count + i] for i in range(count)) == list(range(count))


def test_the_permutation_never_changes_between_releases() -> None:
    order = Order(10, seed=7, shuffle=True, passes=0)
    assert [order[i] for i in range(20)] == [4, 0, 5, 3, 7, 6, 8, 1, 2, 9, 9, 8, 5, 1, 3, 6, 7, 0, 2, 4]


@pytest.mark.parametrize(("task", "answer"), [("max3", max), ("sort3", lambda d: "".join(sorted(d)))])
def test_the_committed_examples_are_right_and_disjoint(task: str, answer: Callable[[str], str]) -> None:
    source = make_source(PromptConfig(path=str(EXAMPLES / task / "prompts.jsonl"), held_out=200, passes=1))
    prompts = [*(source.at(i) for i in range(source.size or 0)), *source.held_out()]
    assert (source.size, len(prompts), len({p.text for p in prompts})) == (800, 1000, 1000)
    assert all(answer(p.text[:3]) == p.metadata["answer"] and p.text[3:] == "=" for p in prompts)


GSM8K = PromptConfig(prompt_field="question", answer_pattern="#### (.+)", shuffle=False)


def path_of(path: Path, rows: list[object]) -> str:
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
    path = path_of(tmp_path / "a.jsonl", [{"question": "2+2?", "answer": "4", "steps": ["a"], "hint": None}])
    for template, why in (
        ("{qestion}", "names the field 'qestion', which is not one of answer, hint, question, steps"),
        ("{steps}", "the field 'steps' of prompts.template is list"),
        ("{hint}", "the field 'hint' of prompts.template is NoneType"),
    ):
        with pytest.raises(SettingsError, match=f"a.jsonl:1: .*{why}"):
            make_source(PromptConfig(path=path, template=template))


def test_with_a_template_all_fields_are_metadata(tmp_path: Path) -> None:
    path = path_of(tmp_path / "a.jsonl", [{"prompt": "2+2", "answer": "4", "unit": "apples"}])
    prompt = only(PromptConfig(path=path, template="{prompt} {unit}?"))
    assert prompt.text == "2+2 apples?"
    assert prompt.metadata == {"prompt": "2+2", "answer": "4", "unit": "apples"}


def test_a_pattern_finds_the_answer_in_its_field(tmp_path: Path) -> None:
    path = path_of(tmp_path / "a.jsonl", sums(600)[-1:])  # type: ignore[arg-type]
    assert only(replace(GSM8K, path=path)).metadata["answer"] == "1,199"
    boxed = path_of(tmp_path / "b.jsonl", [{"problem": "x?", "solution": r"so \boxed{\frac12}. Done"}])
    config = PromptConfig(
        path=boxed, prompt_field="problem", answer_field="solution", answer_pattern=r"\\boxed\{(.+)\}"
    )
    assert only(config).metadata == {"solution": r"so \boxed{\frac12}. Done", "answer": r"\frac12"}


def test_rows_without_an_answer_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    rows = [*sums(5), {"question": "?", "answer": "no idea"}, {"question": "?", "answer": "####  "}]
    path = path_of(tmp_path / "a.jsonl", rows)
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
    path = path_of(tmp_path / "a.jsonl", sums(1))  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"answer_pattern: set prompts\.answer_field"):
        make_source(replace(GSM8K, path=path, answer_field=""))


RATES = [0.5, 0.0, 1.0, None, 0.25, 0.5]


def rated(path: Path, rates: Sequence[float | None] = RATES, **fields: object) -> PromptConfig:
    """Prompts q0, q1 ... of which those with a rate say it."""
    rows: list[object] = [
        {"prompt": f"q{i}", "answer": str(i), **({} if rate is None else {"pass_rate": rate}), **fields}
        for i, rate in enumerate(rates)
    ]
    return replace(written(path / "rated.jsonl", rows), passes=2)


def stream(config: PromptConfig) -> list[str]:
    source = make_source(config)
    return [source.at(i).text for i in range(source.size or 0)]


def test_prompts_outside_the_range_are_left_out_and_unknown_ones_stay(tmp_path: Path) -> None:
    config = replace(rated(tmp_path), min_pass_rate=0.25, max_pass_rate=0.5, shuffle=False)
    assert stream(config) == ["q0", "q3", "q4", "q5"] * 2
    assert stream(replace(config, count=2)) == ["q0", "q3"] * 2
    assert stream(replace(config, max_pass_rate=None)) == ["q0", "q2", "q3", "q4", "q5"] * 2
    assert len(make_source(replace(config, held_out=3)).held_out()) == 3  # chosen before, by place


def test_easy_prompts_come_first_in_every_pass_and_ties_are_shuffled(tmp_path: Path) -> None:
    config = rated(tmp_path, [0.5] * 8 + [1.0, 0.0, None])
    texts = stream(replace(config, easy_first=True))
    first, second = texts[:11], texts[11:]
    for one in (first, second):
        assert (one[0], one[9:]) == ("q8", ["q9", "q10"])
        assert sorted(one[1:9]) == [f"q{i}" for i in range(8)]
    assert first != second
    assert (
        stream(replace(config, easy_first=True, shuffle=False))
        == [*("q8", *(f"q{i}" for i in range(8)), "q9", "q10")] * 2
    )


def test_the_fingerprint_covers_the_choice_and_the_order_and_is_that_of_before_without(
    tmp_path: Path,
) -> None:
    config = rated(tmp_path)
    base = make_source(config).fingerprint
    assert make_source(replace(config, max_pass_rate=1.0)).fingerprint == base  # the same prompts
    others = [
        replace(config, min_pass_rate=0.25),
        replace(config, easy_first=True),
        rated(tmp_path / "..", [0.5, 0.0, 1.0, None, 0.25, 0.75]),
    ]
    assert len({base, *(make_source(other).fingerprint for other in others)}) == 4


def test_a_mixture_and_held_out_sets_keep_to_the_range(tmp_path: Path) -> None:
    config = replace(rated(tmp_path), min_pass_rate=0.25, mixture=(MixtureConfig(name="a"),))
    texts = set(stream(config))
    assert texts == {"q0", "q2", "q3", "q4", "q5"}
    (tmp_path / "other").mkdir()
    other = rated(tmp_path / "other", [0.0], answer="x", prompt="new")
    sets = held_out_sets(make_source(config), config, [HeldOutConfig(name="other", path=other.path)], 10)
    assert [prompt.text for prompt in sets["other"]] == ["new"]  # a set is scored as it is


@pytest.mark.parametrize(
    ("rates", "changed", "says"),
    [
        (RATES, {"min_pass_rate": 0.6, "max_pass_rate": 0.5}, "min_pass_rate: 0.6 is above prompts.max_pass"),
        ([None, None], {"min_pass_rate": 0.1}, "no row has a pass rate in the field 'pass_rate'"),
        ([0.5, "high"], {"easy_first": True}, "prompt 'q1': the field 'pass_rate' is 'high', not a number"),
        ([0.5, 0.5], {"min_pass_rate": 0.9}, "0 of 2 prompts are within prompts.min_pass_rate"),
        (RATES, {"min_pass_rate": 0.25, "count": 6}, "5 of 6 prompts are within .* fewer than 6"),
    ],
)
def test_a_wrong_curriculum_is_refused(
    tmp_path: Path, rates: Sequence[float | None], changed: dict[str, object], says: str
) -> None:
    with pytest.raises(SettingsError, match=says):
        make_source(replace(rated(tmp_path, rates), **changed))  # type: ignore[arg-type]


def test_generated_prompts_have_no_pass_rates() -> None:
    with pytest.raises(
        SettingsError, match=r"prompts\.easy_first: True, but prompts\.source 'reasoning_gym' does not use"
    ):
        make_source(PromptConfig(source="reasoning_gym", families=("chain_sum",), easy_first=True))

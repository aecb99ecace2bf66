"""Tests the curriculum: which prompts pass rates leave out, their order, and what fingerprints cover."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from rollout.prompts.base import PromptConfig
from rollout.prompts.held_out import held_out_sets
from rollout.prompts.named_source import HeldOutConfig, MixtureConfig
from rollout.prompts.registry import make_source
from tests.rollout.prompts.test_rows import written

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

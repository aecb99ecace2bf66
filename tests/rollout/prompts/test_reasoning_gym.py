"""Prompts from reasoning-gym: determinism, disjoint held-out prompts, settings."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from protocol.errors import SettingsError
from rollout.prompts.base import PromptConfig
from rollout.prompts.reasoning_gym import UNSTABLE
from rollout.prompts.registry import make_source
from tests.changes import slow_unless_changed

SMALL = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
CONFIG = PromptConfig(source="reasoning_gym", families=("chain_sum",))


def test_families_take_turns_and_indices_are_pure() -> None:
    config = replace(CONFIG, families=("chain_sum", "spell_backward", "gcd"), seed=3)
    first, second = make_source(config), make_source(config)
    indices = [5000, 0, 1, 2, 1499, 1500, 5000]
    assert [first.at(i) for i in indices] == [second.at(i) for i in reversed(indices)][::-1]
    assert [first.at(i).metadata["family"] for i in range(4)] == [
        "chain_sum",
        "spell_backward",
        "gcd",
        "chain_sum",
    ]
    assert first.size is None
    assert first.fingerprint == second.fingerprint != make_source(replace(config, seed=4)).fingerprint


def test_chunks_do_not_change_the_items() -> None:
    import reasoning_gym

    whole = reasoning_gym.create_dataset("chain_sum", size=1200, seed=11)
    source = make_source(replace(CONFIG, seed=11))
    assert [source.at(i).text for i in (0, 499, 500, 1199)] == [
        whole[i]["question"] for i in (0, 499, 500, 1199)
    ]


def test_a_finite_stream_repeats_its_prompts_in_every_pass() -> None:
    source = make_source(replace(CONFIG, count=40, passes=2))
    assert source.size == 80
    first, second = [[source.at(k * 40 + i).text for i in range(40)] for k in range(2)]
    assert sorted(first) == sorted(second)
    assert first != second


def test_held_out_questions_do_not_occur_in_a_finite_training_set() -> None:
    source = make_source(replace(CONFIG, params=SMALL, count=100, held_out=40))
    trained = {source.at(i).text for i in range(100)}
    held_out = [p.text for p in source.held_out()]
    assert len(held_out) == len(set(held_out)) == 40
    assert not trained & set(held_out)
    assert [p.text for p in source.held_out()] == held_out


def test_a_family_too_small_for_its_held_out_prompts_is_named() -> None:
    with pytest.raises(SettingsError, match="families chain_sum gave only"):
        make_source(replace(CONFIG, params=SMALL, count=3000, held_out=150)).held_out()


def test_an_endless_stream_holds_out_other_seeds() -> None:
    source = make_source(
        replace(CONFIG, held_out=20, params={"chain_sum": {"min_terms": 6, "min_digits": 4}})
    )
    assert len({p.text for p in source.held_out()}) == 20
    assert not {source.at(i).text for i in range(2000)} & {p.text for p in source.held_out()}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"families": ()}, "name at least one"),
        ({"families": ("chain_sun",)}, "did you mean 'chain_sum'"),
        ({"families": ("composite",)}, "'composite' is not known"),
        ({"params": {"gcd": {}}}, "family 'gcd' is not known"),
        ({"params": {"chain_sum": {"seed": 1}}}, "set prompts.count and prompts.seed"),
        ({"params": {"chain_sum": {"min_terms": -1}}}, r"prompts\.params\.chain_sum"),
        ({"params": {"chain_sum": {"terms": 1}}}, r"prompts\.params\.chain_sum"),
        ({"held_out_path": "x"}, "set prompts.held_out"),
    ],
)
def test_wrong_settings_say_what_to_do(change: dict[str, object], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        make_source(replace(CONFIG, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", sorted(UNSTABLE))
def test_families_that_depend_on_hash_seeds_need_a_fixed_one(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(SettingsError, match="set PYTHONHASHSEED=0"):
        make_source(replace(CONFIG, families=(family,)))


@slow_unless_changed("rollout/prompts/")
def test_prompts_are_the_same_in_processes_with_other_hash_seeds() -> None:
    families = ("ab", "countdown", "letter_jumble", "shortest_path", "zebra_puzzles")
    script = (
        "from rollout.prompts.registry import make_source; from rollout.prompts.base import PromptConfig;"
        f"s = make_source(PromptConfig(source='reasoning_gym', families={families!r}));"
        "print([s.at(i) for i in range(10)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1

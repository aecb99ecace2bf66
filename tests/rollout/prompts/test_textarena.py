"""Openings of games as prompts."""

import pytest

from protocol.errors import SettingsError
from rollout.prompts.base import PromptConfig
from rollout.prompts.held_out import held_out_sets
from rollout.prompts.named_source import HeldOutConfig
from rollout.prompts.registry import make_source

CONFIG = PromptConfig(source="textarena", families=("GuessTheNumber-v0", "FrozenLake-v0-random"), held_out=3)


def test_games_take_turns_and_each_has_another_seed() -> None:
    source = make_source(CONFIG)
    prompts = [source.at(index) for index in range(4)]
    assert [prompt.metadata["game"] for prompt in prompts] == [*CONFIG.families] * 2
    assert [prompt.metadata["seed"] for prompt in prompts] == [0, 0, 1, 1]
    assert "Guess The Number" in prompts[0].text
    assert prompts[1].text != prompts[3].text
    assert source.size is None
    assert [make_source(CONFIG).at(index) for index in range(4)] == prompts


def test_held_out_games_have_seeds_of_their_own() -> None:
    source = make_source(CONFIG)
    held = source.held_out()
    assert len(held) == 3
    assert min(prompt.metadata["seed"] for prompt in held) >= 2**31
    sets = held_out_sets(source, CONFIG, (HeldOutConfig(name="other", limit=2),), 9)
    assert {name: len(found) for name, found in sets.items()} == {"held_out": 3, "other": 2}


def test_a_finite_stream_ends_and_is_shuffled() -> None:
    source = make_source(PromptConfig(source="textarena", families=CONFIG.families[:1], count=4, passes=1))
    assert source.size == 4
    assert sorted(source.at(index).metadata["seed"] for index in range(4)) == [0, 1, 2, 3]
    with pytest.raises(IndexError):
        source.at(4)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"families": ("Wordl-v0",)}, "did you mean"),
        ({"params": {"GuessTheNumber-v0": {"seed": 3}}}, "set prompts.seed instead"),
        ({"params": {"GuessTheNumber-v1": {}}}, "did you mean 'GuessTheNumber-v0'"),
        ({"params": {"GuessTheNumber-v0": {"most": 3}}}, "cannot begin: TypeError"),
        ({"template": "x"}, "does not use it"),
    ],
)
def test_wrong_settings_of_games_are_refused(change: dict[str, object], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        make_source(PromptConfig(**{"source": "textarena", "families": ("GuessTheNumber-v0",), **change}))


def test_the_stream_has_a_fingerprint_of_its_games() -> None:
    other = PromptConfig(source="textarena", families=("FrozenLake-v0-random",))
    assert make_source(other).fingerprint != make_source(CONFIG).fingerprint

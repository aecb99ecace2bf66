"""Games of textarena as episodes."""

from dataclasses import replace

import pytest

from protocol.errors import EpisodeError, SettingsError
from rollout.config import EnvironmentConfig
from rollout.environments.registry import make_environment
from rollout.prompts.base import Prompt, PromptConfig
from rollout.prompts.registry import make_source
from rollout.render import RenderConfig, Renderer
from tests.rollout.environments.test_environments import Player, play
from tests.rollout.tokenizers import write_tokenizer

PROMPT = make_source(
    PromptConfig(
        source="textarena",
        families=("GuessTheNumber-v0",),
        params={"GuessTheNumber-v0": {"min_number": 4, "max_number": 5}},
    )
).at(0)
GAME = make_environment(EnvironmentConfig("textarena", {"turn_tokens": 7}))


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ[],:'!"
    return Renderer(write_tokenizer(tmp_path_factory.mktemp("plain"), more=letters), RenderConfig())


def test_a_game_is_played_to_its_end(renderer: Renderer) -> None:
    player = Player(renderer, "4", "5", "4")
    sample = play(GAME, renderer, player, PROMPT)
    said = renderer.text(sample.tokens)
    assert (sample.reward, sample.finish_reason) == (1.0, "environment")
    assert sample.loss_mask[0] == sample.loss_mask[-1] == 1
    assert len(player.asked) == 1 + ("The target number is higher." in said)
    assert all(limit == 7 for _, limit in player.asked)


def test_an_invalid_move_is_reported_and_then_costs_the_game(renderer: Renderer) -> None:
    sample = play(GAME, renderer, Player(renderer, "99", "99"), PROMPT)
    assert "You attempted an invalid move" in renderer.text(sample.tokens)
    assert sample.reward == 0.0


@pytest.mark.parametrize(
    ("prompt", "error", "why"),
    [
        (
            Prompt("?", metadata={"answer": "7"}, index=4),
            SettingsError,
            "prompt 4: the environment textarena",
        ),
        (replace(PROMPT, text="another game"), EpisodeError, "has a different opening than its prompt"),
    ],
)
def test_a_prompt_of_another_source_is_refused(
    renderer: Renderer, prompt: Prompt, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        play(GAME, renderer, Player(renderer), prompt)

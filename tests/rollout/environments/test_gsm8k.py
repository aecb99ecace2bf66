"""Problems of GSM8K: which number counts."""

from fractions import Fraction

import pytest

from protocol.errors import SettingsError
from rollout.config import EnvironmentConfig
from rollout.environments.base import Environment
from rollout.environments.gsm8k import number_in
from rollout.environments.registry import make_environment
from rollout.prompts.base import Prompt
from rollout.render import RenderConfig, Renderer
from tests.rollout.environments.test_environments import Player, play
from tests.rollout.tokenizers import write_tokenizer

PROMPT = Prompt("?", metadata={"answer": "48/2 = 24, 24+48 = 72\n#### 72"}, index=4)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(write_tokenizer(tmp_path_factory.mktemp("plain"), more="`#:/"), RenderConfig())


def gsm8k(**options: object) -> Environment:
    return make_environment(EnvironmentConfig("gsm8k", dict(options)))


@pytest.mark.parametrize(
    ("text", "loose", "strict"),
    [
        ("#### 72", "72", "72"),
        ("#### 71 no #### $1,072.00 it is 5", "1072", "1072"),
        ("so 3 and -4.5.", "-4.5", None),
        ("none", None, None),
        ("", None, None),
        ("#### \u22125", "-5", "-5"),
        ("#### \u20135", "-5", "-5"),
        ("#### 1/2", "1/2", "1/2"),
        ("#### 1e6", "1000000", "1000000"),
        ("#### 1,5", None, None),
        ("#### 3\u20135", None, None),
        ("#### 10-5", None, None),
        ("#### **72**", "72", "72"),
        ("#### \\$72", "72", "72"),
        ("#### \u20ac72.50", "72.5", "72.5"),
        ("#### -$5", "-5", "-5"),
        ("#### 1/0", None, None),
        ("10-5", "5", None),
        ("2024-25", "25", None),
        ("it is 10 - 5", "5", None),
        ("a loss of $-5", "-5", None),
    ],
)
def test_the_marked_number_counts_and_else_the_last(text: str, loose: str | None, strict: str | None) -> None:
    assert number_in(text, False) == (None if loose is None else Fraction(loose))
    assert number_in(text, True) == (None if strict is None else Fraction(strict))


@pytest.mark.parametrize(
    ("options", "lines", "reward"),
    [
        ({}, ["```calculator\n48/2+48\n```", "#### 72"], 1.0),
        ({}, ["it is 72"], 1.0),
        ({"strict": True}, ["it is 72"], 0.0),
        ({}, ["```calculator\n72\n```", "no idea"], 0.0),
        ({"calculator": False}, ["```calculator\n72\n```"], 1.0),
        ({"max_calls": 1}, ["```calculator\n7\n```", "```calculator\n72\n```"], 1.0),
    ],
)
def test_the_last_turn_decides_the_reward(
    renderer: Renderer, options: dict[str, object], lines: list[str], reward: float
) -> None:
    player = Player(renderer, *lines)
    sample = play(gsm8k(**options), renderer, player, PROMPT)
    assert (sample.reward, sample.finish_reason) == (reward, "environment")
    assert len(player.asked) == len(lines)


def test_a_problem_without_a_number_is_refused(renderer: Renderer) -> None:
    with pytest.raises(SettingsError, match="prompt 4: gsm8k needs a number"):
        play(gsm8k(), renderer, Player(renderer), Prompt("?", metadata={"answer": "many"}, index=4))

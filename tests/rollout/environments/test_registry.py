"""Environments of the user: what can be named, and what is refused before a run starts."""

import asyncio
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from rollout.config import EnvironmentConfig
from rollout.environments.base import Environment
from rollout.environments.registry import make_environment
from rollout.render import RenderConfig, Renderer
from tests.rollout.environments.test_environments import PROMPT, Player
from tests.rollout.tokenizers import write_tokenizer

MODULE = """
from rollout.environments.base import Environment
from rollout.environments.single_turn import Options, SingleTurn

async def guess(episode, *, worth: float = 1.0):
    return worth * (await episode.generate() == episode.metadata["answer"])

def plain(episode):
    return 1.0

class Game:
    def __init__(self, worth: float = 1.0):
        if worth < 0:
            raise ValueError("worth nothing")
        self.worth = worth
    async def play(self, episode):
        return await guess(episode, worth=self.worth)

class Tokens(SingleTurn):
    def __init__(self):
        super().__init__(Options())

class NoPlay:
    pass

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that no other test has imported."""
    name = f"my_environment_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize("named", ["guess", "Game"])
def test_functions_and_classes_are_called_with_the_options(tmp_path: Path, module: str, named: str) -> None:
    renderer = Renderer(write_tokenizer(tmp_path / "model"), RenderConfig())
    environment = make_environment(EnvironmentConfig(f"{module}:{named}", {"worth": 2.0}))
    player = Player(renderer, "7")
    sample = asyncio.run(environment.run(PROMPT, renderer.prompt_tokens(PROMPT), player, renderer))
    assert (sample.reward, sample.finish_reason) == (2.0, "environment")


def test_episodes_are_recorded_where_it_is_asked_for(module: str) -> None:
    def recorded(name: str, record: str) -> bool:
        return make_environment(EnvironmentConfig(name, record=record)).has_calls

    for name, by_itself in ((f"{module}:guess", False), ("tools", True)):
        assert [recorded(name, record) for record in ("auto", "on", "off")] == [by_itself, True, False]


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("single_turn", {}, "has no episodes of text to record; remove the setting"),
        (
            "agent",
            {"function": "tests.rollout.environments.agents:plays"},
            "always records its calls; remove",
        ),
    ],
)
def test_environment_that_records_nothing_or_always_has_no_choice(
    name: str, options: dict[str, str], why: str
) -> None:
    with pytest.raises(
        SettingsError, match=f"^setting environment.record: 'off', but environment '{name}' {why}"
    ):
        make_environment(EnvironmentConfig(name, dict(options), record="off"))


def test_a_class_that_is_an_environment_is_used_as_it_is(module: str) -> None:
    made = make_environment(EnvironmentConfig(f"{module}:Tokens"))
    assert isinstance(made, Environment)
    assert type(made).__name__ == "Tokens"


@pytest.mark.parametrize(
    ("named", "options", "why"),
    [
        ("guess", {"wort": 1}, r"unexpected keyword argument 'wort'; it is called with one argument"),
        ("Game", {"wort": 1}, "unexpected keyword argument 'wort'; it is called with environment.options"),
        ("Game", {"worth": -1}, r"\.py:\d+: ValueError: worth nothing"),
        ("plain", {}, "is not asynchronous; write `async def`"),
        ("NoPlay", {}, "has no `async def play"),
        ("number", {}, "is neither a class nor a function"),
        ("gues", {}, "did you mean 'guess'"),
        ("", {}, "is not MODULE:NAME"),
    ],
)
def test_environment_that_does_not_fit_is_refused_with_the_file(
    module: str, named: str, options: dict[str, object], why: str
) -> None:
    with pytest.raises(SettingsError, match=why):
        make_environment(EnvironmentConfig(f"{module}:{named}", options))


def test_a_module_that_is_missing_is_looked_for_by_name() -> None:
    with pytest.raises(SettingsError, match=r"there is no no_such_game\.py in .*run\.modules"):
        make_environment(EnvironmentConfig("no_such_game:play"))

"""Episodes with tools: calls in the text, answers between the turns."""

from pathlib import Path

import pytest

from protocol.errors import SettingsError
from rollout.config import EnvironmentConfig, SandboxConfig
from rollout.environments.base import Environment
from rollout.environments.registry import make_environment
from rollout.render import RenderConfig, Renderer
from rollout.tools.search import build_index
from tests.rollout.environments.test_environments import Player, play
from tests.rollout.tokenizers import write_tokenizer


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(
        write_tokenizer(
            tmp_path_factory.mktemp("plain"), more="`()*/'_[]<>:,!#\"ABCDEFGHIJKLMNOPQRSTUVWXYZ$"
        ),
        RenderConfig(),
    )


def with_tools(**options: object) -> Environment:
    return make_environment(EnvironmentConfig("tools", dict(options)))


def test_a_call_is_answered_and_the_answer_is_not_trained(renderer: Renderer) -> None:
    player = Player(renderer, "```python\nprint(6*7)\n```", "42")
    sample = play(with_tools(turn_tokens=9), renderer, player)
    said = renderer.text(sample.tokens)
    assert said == "```python\nprint(6*7)\n``````output\n42\n```42"
    inserted = [token for token, mask in zip(sample.tokens, sample.loss_mask, strict=True) if not mask]
    assert renderer.text(tuple(inserted)) == "```output\n42\n```"
    assert (sample.reward, sample.finish_reason) == (None, "stop")
    assert [limit for _, limit in player.asked] == [9, 9]


def test_each_call_goes_to_the_tool_that_it_names(renderer: Renderer, tmp_path: Path) -> None:
    build_index(tmp_path / "index", [("", "a river")])
    tools = with_tools(tools=["calculator", "search"], index=str(tmp_path / "index"))
    lines = ["```search\nriver\n```", "```calculator\n1/0\n```", "```python\n1\n```"]
    sample = play(tools, renderer, Player(renderer, *lines))
    said = renderer.text(sample.tokens)
    assert "```output\na river\n```" in said
    assert "```output\nerror: division by zero\n```" in said
    assert said.endswith("```python\n1\n```")


def test_the_files_of_a_shell_are_those_of_the_episode(renderer: Renderer) -> None:
    shell = with_tools(tools=["shell"])
    for _ in range(2):
        player = Player(renderer, "```shell\nls\nmkdir d\n```", "```shell\nls\n```", "8")
        said = renderer.text(play(shell, renderer, player).tokens)
        assert said.count("```output\n(no output)\n```") == 1
        assert said.count("```output\nd\n```") == 1


def test_the_turn_after_the_last_call_is_the_answer(renderer: Renderer) -> None:
    call = "```calculator\n1+1\n```"
    player = Player(renderer, call, call, call, call)
    play(with_tools(tools=["calculator"], max_calls=2), renderer, player)
    assert len(player.asked) == 3


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tools": ["pyton"]}, "did you mean 'python'"),
        ({"tools": ["search"]}, "the tool search needs an index"),
        ({"tools": ["search"], "index": "/nowhere/index"}, "search index /nowhere/index: unable to open"),
        ({"max_calls": -1}, "max_calls"),
        ({"limits": {"wall": 3}}, "did you mean 'wall_s'"),
    ],
)
def test_wrong_options_of_tools_are_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        with_tools(**options)


def test_the_tools_of_an_episode_share_its_sandbox(renderer: Renderer) -> None:
    config = EnvironmentConfig("tools", {"tools": ["shell", "python"]}, sandbox=SandboxConfig("bubblewrap"))
    for _ in range(2):
        lines = ["```shell\nls\necho 6 > f\n```", "```python\nint(open('f').read()) * 7\n```", "42"]
        said = renderer.text(play(make_environment(config), renderer, Player(renderer, *lines)).tokens)
        assert said.count("```output\n(no output)\n```") == 1
        assert said.count("```output\n42\n```") == 1

"""Environments, run with scripted completions."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from rollout.config import EnvironmentConfig, SandboxConfig
from rollout.engines.base import Completion
from rollout.environments.base import Environment
from rollout.environments.registry import ENVIRONMENTS, evaluated, make_environment
from rollout.prompts.base import Prompt
from rollout.render import RenderConfig, Renderer
from rollout.sample import Sample
from tests.rollout.tokenizers import TEMPLATE, write_tokenizer

NEEDED: dict[str, dict[str, object]] = {
    "agent": {"function": "tests.rollout.environments.agents:plays"},
    "command": {"command": ["true"]},
    "harbor": {"command": ["true"]},
    "openenv": {"url": "http://127.0.0.1:1"},
    "server": {"url": "http://127.0.0.1:1/run"},
    "verifiers": {"address": "tcp://127.0.0.1:1"},
}
"""Options without which an environment cannot be made."""
PROMPT = Prompt("?", metadata={"answer": "7"}, index=4)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(write_tokenizer(tmp_path_factory.mktemp("plain")), RenderConfig())


class Player:
    """Says its lines, one a turn, and notes what it was asked. Line i is sampled under version i."""

    def __init__(self, renderer: Renderer, *lines: str) -> None:
        self._lines, self._renderer = lines, renderer
        self.asked: list[tuple[tuple[int, ...], int | None]] = []

    async def __call__(self, tokens: tuple[int, ...], max_tokens: int | None) -> Completion:
        turn = len(self.asked)
        self.asked.append((tokens, max_tokens))
        said = self._renderer.prompt_tokens(Prompt(self._lines[turn]))
        return Completion(said, (-0.5,) * len(said), ((len(said), turn),), "stop")


def play(environment: Environment, renderer: Renderer, player: Player, prompt: Prompt = PROMPT) -> Sample:
    return asyncio.run(environment.run(prompt, renderer.prompt_tokens(prompt), player, renderer))


def guessing(**options: object) -> Environment:
    return make_environment(EnvironmentConfig("guess_number", dict(options)))


def test_a_single_turn_is_the_completion(renderer: Renderer) -> None:
    player = Player(renderer, "abc")
    sample = play(make_environment(EnvironmentConfig()), renderer, player)
    assert renderer.text(sample.tokens) == "abc"
    assert (sample.loss_mask, sample.spans, sample.finish_reason, sample.reward) == (
        (1, 1, 1),
        ((3, 0),),
        "stop",
        None,
    )
    assert player.asked == [(renderer.prompt_tokens(PROMPT), None)]


def test_guessing_continues_until_the_number_is_found(renderer: Renderer) -> None:
    player = Player(renderer, "5", "x", "is it 9 or 8", "7")
    sample = play(guessing(max_turns=8, turn_tokens=5), renderer, player)
    assert renderer.text(sample.tokens) == "5 higher x ? is it 9 or 8 lower 7"
    assert sample.reward == 5 / 8
    assert sample.finish_reason == "environment"
    assert all(limit == 5 for _, limit in player.asked)
    starts = [tokens for tokens, _ in player.asked]
    full = renderer.prompt_tokens(PROMPT) + sample.tokens
    assert all(full[: len(start)] == start for start in starts)


def test_inserted_tokens_have_no_loss_no_logprob_and_the_version_before_them(renderer: Renderer) -> None:
    sample = play(guessing(higher="+", lower="-"), renderer, Player(renderer, "5", "99", "7"))
    assert renderer.text(sample.tokens) == "5+99-7"
    assert sample.loss_mask == (1, 0, 1, 1, 0, 1)
    assert sample.logprobs == (-0.5, 0.0, -0.5, -0.5, 0.0, -0.5)
    assert sample.spans == ((2, 0), (5, 1), (6, 2))


def test_turns_run_out_without_a_last_reply(renderer: Renderer) -> None:
    sample = play(guessing(max_turns=2, higher="+"), renderer, Player(renderer, "1", "2"))
    assert renderer.text(sample.tokens) == "1+2"
    assert (sample.reward, sample.finish_reason) == (0.0, "environment")


def test_with_a_chat_template_the_end_of_turn_is_there_once(tmp_path: Path) -> None:
    chat = Renderer(write_tokenizer(tmp_path, template=TEMPLATE, eos="<|im_end|>"), RenderConfig())
    end = chat.stop_token_ids[0]

    class Ending(Player):
        async def __call__(self, tokens: tuple[int, ...], max_tokens: int | None) -> Completion:
            self.asked.append((tokens, max_tokens))
            return Completion((5 + 3, end), (-0.5, -0.5), ((2, 0),), "stop")

    sample = play(guessing(max_turns=2), chat, Ending(chat))
    shown = chat._tokenizer.decode(sample.tokens)
    assert shown == "3<|im_end|><|im_start|>user\n higher <|im_end|><|im_start|>assistant\n3<|im_end|>"


@pytest.mark.parametrize("metadata", [{}, {"answer": "seven"}, {"answer": None}])
def test_guessing_needs_a_number(renderer: Renderer, metadata: dict[str, object]) -> None:
    player = Player(renderer)
    with pytest.raises(SettingsError, match="prompt 4: guess_number needs a whole number"):
        play(guessing(), renderer, player, Prompt("?", metadata=metadata, index=4))
    assert not player.asked


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: make_environment(EnvironmentConfig("single-turn")), "did you mean 'single_turn'"),
        (lambda: guessing(max_turn=3), "did you mean 'max_turns'"),
        (lambda: guessing(max_turns="three"), "option max_turns: Input should be a valid integer"),
        (lambda: guessing(max_turns=0), "option max_turns: 0 is not at least 1"),
    ],
)
def test_wrong_settings_say_what_to_do(make: Callable[[], Environment], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        make()


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_environment_can_be_made_with_its_defaults(name: str) -> None:
    sandbox = SandboxConfig("bubblewrap" if name == "harbor" else "process")
    config = EnvironmentConfig(name, NEEDED.get(name, {}), sandbox=sandbox)
    assert isinstance(make_environment(config), Environment)


def given(**options: object) -> Environment:
    return make_environment(EnvironmentConfig("given", dict(options)))


def test_given_answers_with_the_data_under_the_version_of_the_engine(renderer: Renderer) -> None:
    player = Player(renderer, "anything")
    sample = play(given(append_eos=False), renderer, player, Prompt("?", metadata={"answer": "3 and 4"}))
    assert renderer.text(sample.tokens) == "3 and 4"
    count = len(sample.tokens)
    assert (sample.logprobs, sample.loss_mask, sample.spans) == ((0.0,) * count, (1,) * count, ((count, 0),))
    assert (sample.finish_reason, sample.reward) == ("stop", None)
    assert player.asked == [(renderer.prompt_tokens(PROMPT), 1)]


def test_given_completions_may_have_a_prefix_an_end_and_a_limit(renderer: Renderer) -> None:
    sample = play(given(prefix="so ", field="words"), renderer, Player(renderer, "x"), WORDS)
    assert sample.tokens == renderer.completion_tokens("so a b", append_eos=True)
    assert sample.tokens[-1] in renderer.stop_token_ids
    cut = play(given(max_tokens=2, field="words"), renderer, Player(renderer, "x"), WORDS)
    assert cut.tokens == renderer.completion_tokens("a b", append_eos=True)[:2]
    assert cut.finish_reason == "length"


WORDS = Prompt("?", metadata={"words": "a b", "empty": "", "number": 3}, index=4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs text in the field 'answer'.*which has empty, number, words"),
        ({"field": "number"}, "needs text in the field 'number'"),
        ({"field": "empty", "append_eos": False}, "prompt 4: its completion has no tokens"),
    ],
)
def test_given_names_what_the_data_lack(options: dict[str, object], words: str, renderer: Renderer) -> None:
    with pytest.raises(SettingsError, match=words):
        play(given(**options), renderer, Player(renderer, "x"), WORDS)


def test_an_evaluation_has_the_model_answer() -> None:
    guessing_config = EnvironmentConfig("guess_number", {"max_turns": 2})
    assert evaluated(EnvironmentConfig("given", {"field": "words"})) == EnvironmentConfig("single_turn")
    assert evaluated(guessing_config) == guessing_config

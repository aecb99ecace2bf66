"""An episode as text: what becomes of turns, insertions and rewards."""

import asyncio
from pathlib import Path

import pytest

from rollout.engines.base import Completion
from rollout.environments.episode import Episode, EpisodeEnvironment, Play
from rollout.render import RenderConfig, Renderer
from rollout.sample import EpisodeOver, Sample
from tests.rollout.environments.test_environments import PROMPT, Player
from tests.rollout.tokenizers import TEMPLATE, write_tokenizer


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(write_tokenizer(tmp_path_factory.mktemp("plain")), RenderConfig())


def played(play: Play, renderer: Renderer, player: Player) -> Sample:
    tokens = renderer.prompt_tokens(PROMPT)
    return asyncio.run(EpisodeEnvironment(play).run(PROMPT, tokens, player, renderer))


def test_insertions_between_two_turns_are_one_message(renderer: Renderer) -> None:
    async def play(episode: Episode) -> int:
        assert episode.metadata["answer"] == "7"
        assert await episode.generate(5) == "3"
        episode.insert("+")
        episode.insert("-")
        assert await episode.generate() == "4"
        episode.insert("no turn follows")
        assert episode.turns == 2
        return 1

    player = Player(renderer, "3", "4")
    sample = played(play, renderer, player)
    assert renderer.text(sample.tokens) == "3+\n-4"
    assert sample.loss_mask == (1, 0, 0, 0, 1)
    assert sample.spans == ((4, 0), (5, 1))
    assert (sample.reward, sample.finish_reason) == (1.0, "environment")
    assert [limit for _, limit in player.asked] == [5, None]
    prompt = renderer.prompt_tokens(PROMPT)
    assert [tokens for tokens, _ in player.asked] == [prompt, prompt + sample.tokens[:4]]


def test_half_of_a_surrogate_pair_is_refused_where_it_is_inserted(renderer: Renderer) -> None:
    async def play(episode: Episode) -> int:
        await episode.generate()
        episode.insert("+")
        with pytest.raises(ValueError, match=r"insert\(\): the text has half of a surrogate pair, '\\ud800'"):
            episode.insert("a\ud800b")
        await episode.generate()
        return 1

    assert renderer.text(played(play, renderer, Player(renderer, "3", "4")).tokens) == "3+4"


def test_without_a_reward_the_verifiers_score(renderer: Renderer) -> None:
    async def play(episode: Episode) -> None:
        await episode.generate()

    sample = played(play, renderer, Player(renderer, "3"))
    assert (sample.reward, sample.finish_reason) == (None, "stop")


def test_the_end_of_a_turn_is_inserted_where_the_model_left_it_out(tmp_path: Path) -> None:
    chat = Renderer(write_tokenizer(tmp_path, template=TEMPLATE, eos="<|im_end|>"), RenderConfig())

    async def play(episode: Episode) -> None:
        await episode.generate()
        episode.insert("ok")
        await episode.generate()

    sample = played(play, chat, Player(chat, "3", "4"))
    shown = chat._tokenizer.decode(sample.tokens)
    assert "<|im_end|><|im_start|>user\nok<|im_end|><|im_start|>assistant\n" in shown
    assert len(sample.tokens) == len(sample.loss_mask) == sample.spans[-1][0]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1"])
def test_a_reward_that_is_no_finite_number_is_refused(renderer: Renderer, reward: float) -> None:
    async def play(episode: Episode) -> float:
        await episode.generate()
        return reward

    with pytest.raises(ValueError, match="a reward is a finite float"):
        played(play, renderer, Player(renderer, "3"))


def test_an_episode_without_a_turn_has_no_sample(renderer: Renderer) -> None:
    async def silent(episode: Episode) -> float:
        return 1.0

    async def hasty(episode: Episode) -> float:
        episode.insert("hello")
        return 1.0

    with pytest.raises(ValueError, match="before the model said anything"):
        played(silent, renderer, Player(renderer))
    with pytest.raises(RuntimeError, match="after the first turn of the model"):
        played(hasty, renderer, Player(renderer))


def test_an_insertion_without_room_for_a_turn_is_not_in_the_sample(renderer: Renderer) -> None:
    class Short(Player):
        async def __call__(self, tokens: tuple[int, ...], max_tokens: int | None) -> Completion:
            if self.asked:
                raise EpisodeOver
            return await super().__call__(tokens, max_tokens)

    async def play(episode: Episode) -> float:
        episode.reward = 0.5
        await episode.generate()
        episode.insert("on")
        await episode.generate()
        return 1.0

    sample = played(play, renderer, Short(renderer, "3"))
    assert (renderer.text(sample.tokens), sample.reward, sample.finish_reason) == ("3", 0.5, "length")


def test_turns_of_an_episode_cannot_overlap(renderer: Renderer) -> None:
    async def play(episode: Episode) -> float:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(episode.generate())
            tasks.create_task(episode.generate())
        return 1.0

    class Slow(Player):
        async def __call__(self, tokens: tuple[int, ...], max_tokens: int | None) -> Completion:
            await asyncio.sleep(0)
            return await super().__call__(tokens, max_tokens)

    with pytest.raises(ExceptionGroup) as failure:
        played(play, renderer, Slow(renderer, "3", "4"))
    assert failure.group_contains(RuntimeError, match="one after the other")


def test_text_that_cannot_fit_ends_the_episode_before_it_is_tokens(renderer: Renderer) -> None:
    async def play(episode: Episode) -> None:
        await episode.generate()
        episode.insert("1" * 10**8)
        with pytest.raises(EpisodeOver, match=r"at least \d+ tokens fill engine.max_model_len 64"):
            await episode.generate()

    player = Player(renderer, "3")
    player.max_model_len = 64  # type: ignore[attr-defined]
    assert played(play, renderer, player).finish_reason == "stop"
    assert len(player.asked) == 1

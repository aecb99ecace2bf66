"""Games of textarena: what a seed decides, and which games can be played."""

import asyncio
import random

import pytest

from protocol.errors import SettingsError
from rollout.text_games import TextGame, checked_games, in_game_thread

GAMES = ("GuessTheNumber-v0", "FrozenLake-v0-random")


def test_a_seed_decides_the_game_and_leaves_other_numbers_as_they_were() -> None:
    random.seed(7)
    expected = random.random()
    random.seed(7)
    first, second = TextGame("2048-v0-easy", 3, {}), TextGame("2048-v0-easy", 3, {})
    assert random.random() == expected
    assert first.opening == second.opening != TextGame("2048-v0-easy", 4, {}).opening
    moves = ["[up]", "left", "[down]", "[right]"]
    said = [first.step(move) for move in moves]
    assert [second.step(move) for move in moves] == said
    assert all(said)


def test_the_end_of_a_game_has_the_games_reward() -> None:
    game = TextGame("GuessTheNumber-v0", 3, {})
    said = [game.step(str(number)) for number in range(1, 21)]
    assert said.index(None) >= 1 or said[0] is None
    assert said[0] is None or "target number is" in said[0]
    ended = TextGame("GuessTheNumber-v0", 3, {"min_number": 5, "max_number": 5})
    assert ended.step("it is [5]") is None
    assert ended.reward() == 1.0


async def test_games_are_played_side_by_side() -> None:
    async def played(seed: int) -> list[str | None]:
        game = await in_game_thread(TextGame, "2048-v0-easy", seed, {})
        return [await in_game_thread(game.step, move) for move in ("[up]", "[left]", "[up]")]

    async with asyncio.TaskGroup() as tasks:
        both = [tasks.create_task(played(3)) for _ in range(2)]
    assert both[0].result() == both[1].result() == await played(3)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ((), "name at least one game"),
        (("GuessTheNumbr-v0",), "did you mean 'GuessTheNumber-v0'"),
        (("GuessTheNumber-v0-train",), "did you mean 'GuessTheNumber-v0"),
    ],
)
def test_games_that_there_are_not_are_refused(names: tuple[str, ...], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        checked_games(names)
    assert checked_games(GAMES) == GAMES


@pytest.mark.parametrize(
    ("name", "params"), [("TicTacToe-v0", {}), ("TwentyQuestions-v0", {}), ("GuessTheNumber-v0", {"max": 3})]
)
def test_a_game_that_cannot_begin_says_why(name: str, params: dict[str, int]) -> None:
    with pytest.raises(SettingsError, match=rf"textarena game {name} with seed 3 cannot begin: \w+"):
        TextGame(name, 3, params)

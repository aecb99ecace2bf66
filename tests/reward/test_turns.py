"""Tests scores of turns: from a function of the user to the message, with weights and fallbacks."""

import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.messages import Rollout, ScoredRollout, ScoreFailure
from protocol.tensors import Array
from reward.combine import VerifierError
from reward.config import RewardConfig, VerifierConfig
from reward.score import score_rollout
from reward.turns import TurnScores, combine_turns
from reward.workers.pool import ScorePool
from tests.protocol.samples import ROLLOUT

pytestmark = pytest.mark.xdist_group("sandbox")

OWN = """
import asyncio

def lengths(*, turns, contexts):
    return [len(turn) + 10 * len(context) for turn, context in zip(turns, contexts)]

async def awaited(*, turns, metadata):
    await asyncio.sleep(0)
    return [float(turn == metadata["answer"]) for turn in turns]

def ranked(*, responses, turns):
    return [[float(i)] * len(of_sample) for i, of_sample in enumerate(turns)]

def picky(*, turns):
    return {"a": [0.5, 0.25], "c": [1.0]}[turns[0]]

def wrong(*, turns, metadata):
    return metadata["wrong"]

def summed(*, response):
    return len(response)
"""


def own(name: str, **more: Any) -> VerifierConfig:
    return VerifierConfig("function", options={"path": f"own_turns:{name}"}, label=name, **more)


def rollout(**changed: Any) -> Rollout:
    """Two samples: turns a, bb behind the text "-", and one turn c."""
    found = {"turn_texts": ("a", "bb", "c"), "turn_contexts": ("", "-", ""), "environment_rewards": None}
    return msgspec.structs.replace(ROLLOUT, **found | changed)


@pytest.fixture
def modules(tmp_path: Path) -> list[str]:
    (tmp_path / "own_turns.py").write_text(OWN)
    return [str(tmp_path)]


async def scored(modules: list[str], given: Rollout, *verifiers: VerifierConfig, **config: Any) -> Any:
    async with ScorePool(RewardConfig(verifiers=verifiers, workers=1, **config), modules) as pool:
        assert pool.scores_turns
        return await score_rollout(given, pool, "reward.1")


def numbers(array: Array | None) -> list[float]:
    assert array is not None
    found: list[float] = array.numpy().tolist()
    return found


async def test_turns_are_scored_and_combined_with_whole_samples(modules: list[str]) -> None:
    given = rollout(
        metadata=msgspec.Raw(msgspec.msgpack.encode({"answer": "bb"})),
        environment_rewards=Array.of([100.0, 200.0], "float32"),
    )
    verifiers = (own("lengths", weight=2.0), own("awaited"), own("ranked", weight=-1.0), own("summed"))
    found = await scored(modules, given, *verifiers, environment_weight=0.5)
    assert isinstance(found, ScoredRollout)
    assert {name: numbers(values) for name, values in found.turn_components.items()} == {
        "lengths": [1.0, 12.0, 1.0], "awaited": [0.0, 1.0, 0.0], "ranked": [0.0, 0.0, 1.0],
    }  # fmt: skip
    assert {name: numbers(values) for name, values in found.components.items()} == {
        "lengths": [13.0, 1.0], "awaited": [1.0, 0.0], "ranked": [0.0, 1.0], "summed": [2.0, 1.0],
        "environment": [100.0, 200.0],
    }  # fmt: skip
    # what is of the whole sample counts at its last turn
    assert numbers(found.turn_rewards) == [2.0, 24.0 + 1.0 + 2.0 + 50.0, 2.0 - 1.0 + 1.0 + 100.0]
    assert numbers(found.rewards) == [79.0, 102.0]


async def test_a_fallback_of_the_whole_sample_counts_at_its_last_turn(modules: list[str]) -> None:
    verifiers = (own("picky", weight=2.0, fallback="summed"), own("summed"))
    given = rollout(turn_texts=("a", "bb", "x"))
    found = await scored(modules, given, *verifiers)
    assert numbers(found.turn_rewards) == [1.0, 0.5, 2.0]
    assert numbers(found.components["fell_back"]) == [0.0, 1.0]
    verifiers = (own("summed", fallback="lengths"), own("lengths"))  # nothing falls back
    found = await scored(modules, given, *verifiers)
    assert (found.turn_rewards, found.turn_components) == (None, {})


async def test_samples_of_one_turn_have_scores_of_samples_alone(modules: list[str]) -> None:
    given = rollout(turns=None, turn_texts=(), turn_contexts=(), responses=("abc", "d"))
    found = await scored(modules, given, own("lengths"))
    assert numbers(found.rewards) == [3.0, 1.0]
    assert (found.turn_rewards, found.turn_components) == (None, {})


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([1.0], r"returned 1 scores for 2 turns of sample 0 .*return a list of 2"),
        (1.0, "returned float for 2 turns of sample 0"),
        ([1.0, "x"], "returned 'x'"),
        ([1.0, math.nan], "returned nan"),
    ],
)
async def test_other_numbers_of_scores_fail_the_group(modules: list[str], wrong: Any, says: str) -> None:
    given = rollout(metadata=msgspec.Raw(msgspec.msgpack.encode({"wrong": wrong})))
    found = await scored(modules, given, own("wrong"))
    assert isinstance(found, ScoreFailure)
    assert found.verifier == "wrong"
    assert re.search(says, found.error), found.error


async def test_texts_that_nobody_sent_are_named(modules: list[str]) -> None:
    found = await scored(modules, rollout(turn_texts=(), turn_contexts=()), own("lengths"))
    assert isinstance(found, ScoreFailure)
    assert "sent no texts" in found.error


def test_scores_of_a_worker_process_are_checked_again() -> None:
    turns = TurnScores([2, 1])
    with pytest.raises(VerifierError, match="v: 3 scores for 2 turns of sample 0"):
        turns.note("v", 0, [1.0, 2.0, 3.0])
    with pytest.raises(VerifierError, match="v: scored turn 1 of sample 0 as inf"):
        turns.note("v", 0, [1.0, math.inf])
    with pytest.raises(VerifierError, match=r"v: scored turn 0 of sample 0 as 1e\+31"):
        turns.note("v", 0, [1e31, 0.0])
    turns.note("v", 0, [1e30, -1e30])
    components = {"v": [0.0, 3.0]}
    filled = turns.filled(components)
    assert filled == {"v": [[1e30, -1e30], [3.0]]}
    with pytest.raises(VerifierError, match=r"v: scored 1e\+30, which is too large with the weight 10"):
        combine_turns(components, filled, {"v": 10.0})
    assert TurnScores([2, 1]).filled(components) == {}
    assert combine_turns(components, {}, {"v": 1.0}) == []

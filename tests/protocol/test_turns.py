"""Tests reading the turns of a rollout, and what is refused."""

from typing import Any

import msgspec
import pytest

from protocol.codec import decode
from protocol.errors import ProtocolError
from protocol.messages import Rollout, ScoredRollout
from protocol.tensors import Array
from protocol.turns import TurnPlace, by_sample, turns_of
from tests.protocol.samples import BRANCHED, GOLDEN, ROLLOUT


def test_turns_are_listed_for_each_sample() -> None:
    found = turns_of(ROLLOUT)
    assert found == [[TurnPlace(0, 0, 1), TurnPlace(0, 1, 2)], [TurnPlace(1, 0, 1)]]
    assert by_sample(ROLLOUT.turn_texts, found) == [["a", "b"], ["c"]]
    branched = msgspec.structs.replace(
        BRANCHED, turns=Array.of([[0, 1, 1, 2], [0, 0, 0, 2], [1, 2, 0, 1]], "int32")
    )
    assert turns_of(branched) == [[TurnPlace(1, 1, 2), TurnPlace(0, 0, 2)], [TurnPlace(2, 0, 1)]]


def test_a_release_without_turns_is_read() -> None:
    for name in ("rollout", "scored"):
        _, message = decode((GOLDEN / f"{name}.v2.without_read_tokens.msgpack").read_bytes())
        rollout = message.rollout if isinstance(message, ScoredRollout) else message
        assert isinstance(rollout, Rollout)
        assert turns_of(rollout) is None


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        ([[0, 0, 0, 2], [1, 0, 0, 1]], r"turns row 1 \(1, 0, 0, 1\) is not in its sample"),
        ([[0, 0, 0, 3], [1, 1, 0, 1]], "turns row 0 .* is not in its sample"),
        ([[0, 0, 2, 1], [1, 1, 0, 1]], "turns row 0 .* is not in its sample"),
        ([[0, 9, 0, 1], [1, 1, 0, 1]], "turns row 0 .* is not in its sample"),
        ([[1, 1, 0, 1], [0, 0, 0, 2]], "turns row 1 .* is not in its sample"),
        ([[0, 0, 0, 2]], "turns has a sample without a turn"),
        ([[0, 0, 0, 2], [0, 0, 1, 2], [1, 1, 0, 1]], "turns overlap"),
        ([[0, 0, 0, 1], [1, 1, 0, 1]], "turns leave out a sampled token"),
    ],
)
def test_turns_that_contradict_the_rows_are_refused(turns: list[list[int]], says: str) -> None:
    made = msgspec.structs.replace(ROLLOUT, turns=Array.of(turns, "int32"), turn_texts=(), turn_contexts=())
    with pytest.raises(ProtocolError, match=f"group 7: {says}"):
        turns_of(made)


@pytest.mark.parametrize(
    "changed",
    [{"turn_texts": ("a",)}, {"turn_contexts": ("a", "b")}, {"turns": None}],
)
def test_texts_of_another_number_of_turns_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="group 7: turn_"):
        turns_of(msgspec.structs.replace(ROLLOUT, **changed))


def test_lengths_of_more_than_has_arrived_are_refused() -> None:
    made = msgspec.structs.replace(ROLLOUT, lengths=Array.of([2**31 - 1, 2**31 - 1], "int32"))
    with pytest.raises(ProtocolError, match="group 7: loss_mask"):
        turns_of(made)

"""Tests that an answer of a rank is taken for its own call alone, and that no call of ours raises in vLLM."""

import pytest

from protocol.errors import EngineError
from rollout.engines.vllm.rank_answers import NumberedCalls
from rollout.engines.vllm.worker import WorkerExtension


class Extension(WorkerExtension):
    """Has a method that works, and one that does not."""

    def tether_double(self, value: int) -> int:
        return 2 * value

    def tether_broken(self) -> None:
        raise MemoryError("no room for 26 MiB")


def test_the_values_of_all_ranks_are_returned() -> None:
    calls = NumberedCalls("e")
    number = calls.next()
    answers = [Extension().tether_call(number, "double", (value,)) for value in (1, 2)]
    assert calls.values(number, "double", answers) == [2, 4]


def test_a_method_that_raises_is_an_answer() -> None:
    calls = NumberedCalls("e")
    number = calls.next()
    answers = [(number, "", None), Extension().tether_call(number, "broken", ())]
    with pytest.raises(EngineError, match="engine e, rank 1: broken: MemoryError: no room for 26 MiB"):
        calls.values(number, "broken", answers)


def test_an_answer_of_an_earlier_call_is_refused() -> None:
    calls = NumberedCalls("e")
    late = Extension().tether_call(calls.next(), "double", (1,))
    number = calls.next()
    with pytest.raises(EngineError, match="rank 1: commit: the answer is of call 1, and this is call 2"):
        calls.values(number, "commit", [(number, "", {"applied": True}), late])

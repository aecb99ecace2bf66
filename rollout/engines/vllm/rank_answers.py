"""Matches the ranks' answers to their call.

vLLM reads answers from one queue per rank, and stops reading when a rank raises. The other answers then
remain in their queues, and the next call would take them for its own. Therefore no method of the worker
extension raises, and every answer contains the number of its call.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from protocol.errors import EngineError

Answer = tuple[int, str, Any]
"""(number of the call, error or "", result of the method)."""


class NumberedCalls:
    """Counter of the calls to an engine's ranks, from 1."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._numbers = itertools.count(1)

    def next(self) -> int:
        """Return the number of the next call."""
        return next(self._numbers)

    def values(self, number: int, method: str, answers: Sequence[Answer]) -> list[Any]:
        """Return each rank's result of a call.

        Raises:
            EngineError: a rank failed, or answered another call.
        """
        for rank, (answered, error, _) in enumerate(answers):
            where = f"engine {self._engine}, rank {rank}: {method}"
            if answered != number:
                raise EngineError(f"{where}: the answer is of call {answered}, and this is call {number}")
            if error:
                raise EngineError(f"{where}: {error}")
        return [value for _, _, value in answers]

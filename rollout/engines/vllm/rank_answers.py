"""Matches the ranks' answers with the call that they answer.

vLLM takes answers off one queue for each rank. If a rank raises, it reads no further: the other ranks'
answers stay there, and the next call gets them as its own. So no method of our worker extension raises, and
every answer says which call it is of.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from protocol.errors import EngineError

Answer = tuple[int, str, Any]
"""Number of the call, error (or empty), and the method's result."""


class NumberedCalls:
    """Numbers the calls to an engine's ranks, from 1."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._numbers = itertools.count(1)

    def next(self) -> int:
        """Return the number of the next call."""
        return next(self._numbers)

    def values(self, number: int, method: str, answers: Sequence[Answer]) -> list[Any]:
        """Return what each rank has returned to a call.

        Raises:
            EngineError: a rank has failed, or its answer is of another call.
        """
        for rank, (answered, error, _) in enumerate(answers):
            where = f"engine {self._engine}, rank {rank}: {method}"
            if answered != number:
                raise EngineError(f"{where}: the answer is of call {answered}, and this is call {number}")
            if error:
                raise EngineError(f"{where}: {error}")
        return [value for _, _, value in answers]

"""Sends the calls that wait at the same moment as one batch: one packet, one wake-up, one sync of the server.

There is no task and no timer: a call that finds a free lane sends everything that waits, itself included, and
hands the lane on to the next call that has come meanwhile. A lone call is sent at once; load makes batches
larger instead of more.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

Word = str | int | float | bytes
MOST_CALLS = 64
"""Most calls of one batch."""


class _Call:
    """A command that has no answer yet."""

    __slots__ = ("answer", "sends", "turn", "words")

    def __init__(self, words: tuple[Word, ...]) -> None:
        self.words = words
        self.answer: Any = None
        self.sends = False
        """Whether it holds a lane, to send the next batch."""
        self.turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Ends with True if the call is to send a batch, with False once it has its answer."""


class Batches:
    """Has commands answered that were called at the same time; `batches(*words)` is one of them.

    What waits is bounded by the number of callers. A command may be sent twice: each must be safe to repeat.
    """

    def __init__(
        self, send: Callable[[Sequence[tuple[Word, ...]]], Awaitable[Sequence[Any]]], *, lanes: int
    ) -> None:
        """Start without a batch under way.

        Args:
            send: has a batch answered; an answer that is an Exception is raised to its caller.
            lanes: batches that are under way at a time.
        """
        self._send = send
        self._free = lanes
        self._waiting: deque[_Call] = deque()

    async def __call__(self, *words: Word) -> Any:
        """Return the answer to a command. Cancelled, it may or may not have taken effect.

        Raises:
            Exception: the server's error for this command, or the reason why the batch has no answers.
        """
        call = _Call(words)
        self._waiting.append(call)
        try:
            if self._free:
                self._free -= 1
                call.sends = True
                await self._send_batch(call)
            while await call.turn:
                await self._send_batch(call)
        except asyncio.CancelledError:
            with contextlib.suppress(ValueError):  # it is in a batch already
                self._waiting.remove(call)
            raise
        finally:
            if call.sends:
                self._pass_on(call)
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer

    async def _send_batch(self, sender: _Call) -> None:
        """Have what waits answered. Cancelled, it leaves the other calls waiting, to be sent again."""
        await asyncio.sleep(0)  # calls of this iteration of the loop join
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST_CALLS))]
        if batch:
            try:
                answers = await self._send([call.words for call in batch])
            except asyncio.CancelledError:
                self._waiting.extendleft(
                    call for call in reversed(batch) if call is not sender and not call.turn.done()
                )
                raise
            except Exception as error:
                answers = [error] * len(batch)
            for call, answer in zip(batch, answers, strict=True):
                call.answer = answer
                if not call.turn.done():  # else it was cancelled
                    call.turn.set_result(False)
        self._pass_on(sender)

    def _pass_on(self, sender: _Call) -> None:
        """Hand the sender's lane to the call that has waited longest, or free it."""
        sender.sends = False
        heir = next((call for call in self._waiting if not (call.sends or call.turn.done())), None)
        if heir is None:
            self._free += 1
            return
        heir.sends = True
        turn, heir.turn = heir.turn, asyncio.get_running_loop().create_future()
        turn.set_result(True)

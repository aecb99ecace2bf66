"""Sends concurrent commands to the server as one batch: one packet, one wake-up, one sync of the server.

There is no task and no timer. A call that finds a free lane sends all waiting commands including its own,
then passes the lane on to the next waiting call. A single call is sent at once. Load makes batches larger,
not more frequent.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

Word = str | int | float | bytes
MAX_CALLS = 64
"""Maximum number of commands in a batch."""


class _Call:
    """A command without an answer so far."""

    __slots__ = ("answer", "holds_lane", "turn", "words")

    def __init__(self, words: tuple[Word, ...]) -> None:
        self.words = words
        self.answer: Any = None
        self.holds_lane = False
        """Whether the call holds a lane, to send the next batch."""
        self.turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Resolves to True when the call must send a batch, to False once it has its answer."""


class Batches:
    """Batching of concurrent commands; `batches(*words)` sends one command.

    The number of callers bounds the queue. A command may be sent twice, so each must be idempotent.
    """

    def __init__(
        self, send: Callable[[Sequence[tuple[Word, ...]]], Awaitable[Sequence[Any]]], *, lanes: int
    ) -> None:
        """Start without batches in flight.

        Args:
            send: sends a batch and returns its answers; an answer that is an Exception is raised in its
                caller.
            lanes: maximum number of batches in flight.
        """
        self._send = send
        self._free_lanes = lanes
        self._waiting: deque[_Call] = deque()

    async def __call__(self, *words: Word) -> Any:
        """Return the answer to a command. If cancelled, the command may have taken effect.

        Raises:
            Exception: the server's error for this command, or the error of the whole batch.
        """
        call = _Call(words)
        self._waiting.append(call)
        try:
            if self._free_lanes:
                self._free_lanes -= 1
                call.holds_lane = True
                await self._send_batch(call)
            while await call.turn:
                await self._send_batch(call)
        except asyncio.CancelledError:
            with contextlib.suppress(ValueError):  # the call is already in a batch
                self._waiting.remove(call)
            raise
        finally:
            if call.holds_lane:
                self._pass_lane(call)
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer

    async def _send_batch(self, sender: _Call) -> None:
        """Send the waiting commands and distribute their answers. If cancelled, they are queued again."""
        await asyncio.sleep(0)  # collects the other calls of this event loop iteration
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_CALLS))]
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
                if not call.turn.done():  # done if cancelled
                    call.turn.set_result(False)
        self._pass_lane(sender)

    def _pass_lane(self, sender: _Call) -> None:
        """Pass the sender's lane on to the oldest waiting call, or free the lane."""
        sender.holds_lane = False
        eligible = (call for call in self._waiting if not (call.holds_lane or call.turn.done()))
        next_sender = next(eligible, None)
        if next_sender is None:
            self._free_lanes += 1
            return
        next_sender.holds_lane = True
        turn, next_sender.turn = next_sender.turn, asyncio.get_running_loop().create_future()
        turn.set_result(True)

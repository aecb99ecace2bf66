"""Journals and a reader that stop, or cancel who asked, in the middle of a call."""

import asyncio
from typing import Any

from protocol.messages import Call
from rollout.sessions.answers.reader import AnswerReader, ReadAnswer
from rollout.sessions.record import CallJournal


class Hung:
    """A journal whose calls reach the disk, and whose acknowledgement of the first one never comes."""

    def __init__(self, journal: CallJournal) -> None:
        self.recall, self._journal, self.reached = journal.recall, journal, asyncio.Event()

    async def store(self, call: Call) -> None:
        await self._journal.store(call)
        if not self.reached.is_set():
            self.reached.set()
            await asyncio.Event().wait()


class Cancelling:
    """A journal that stores a call and cancels who asked for it, so that both end at once."""

    def __init__(self, journal: CallJournal) -> None:
        self.recall, self._journal = journal.recall, journal
        self.caller: asyncio.Task[Any] | None = None

    async def store(self, call: Call) -> None:
        await self._journal.store(call)
        if self.caller is not None:
            self.caller.cancel()
            self.caller = None


class HangingReader(AnswerReader):
    """Never finishes the first answer."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = asyncio.Event()

    async def read(self, *args: Any) -> ReadAnswer:
        if not self.reached.is_set():
            self.reached.set()
            await asyncio.Event().wait()
        return await super().read(*args)

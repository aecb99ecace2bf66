"""A message on its way, and how it may end."""

import asyncio

from protocol.errors import TetherError
from services.bus.links import Link


class Declined(TetherError):
    """The receiver refused a message for good; `why` is what it gave to `Receiver.refuse`."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Pending:
    """A message that is not finished."""

    __slots__ = ("done", "frame", "id", "link", "ordinal")

    def __init__(self, id: str, frame: bytes) -> None:
        self.id = id
        self.frame = frame
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.link: Link[Pending] | None = None
        self.ordinal = 0
        """Number of the message on its link, from 1."""

"""A message on its way, and how it may end."""

from collections.abc import Callable

from protocol.errors import TetherError
from services.bus.links import Link

OnDone = Callable[[Exception | None], None]


class Declined(TetherError):
    """The receiver refused a message for good; `why` is what it gave to `Receiver.refuse`."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Pending:
    """A message that is not finished."""

    __slots__ = ("frame", "id", "link", "on_done", "ordinal")

    def __init__(self, id: str, frame: bytes, on_done: OnDone) -> None:
        self.id = id
        self.frame = frame
        self.on_done = on_done
        self.link: Link[Pending] | None = None
        self.ordinal = 0
        """Number of the message on its link, from 1."""

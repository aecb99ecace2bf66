"""Sends the calls of leased groups to the ingest, and gets those of earlier leases back."""

from protocol.codec import decode_payload
from protocol.errors import EpisodeError, FrameTooLarge
from protocol.messages import Call, Recall, Recalled
from rollout.sessions.record import Recording
from services.bus.sender import Declined, Sender
from services.ledger.interface import Lease


class CallSender:
    """The calls of one leased group."""

    def __init__(self, sender: Sender, lease: Lease) -> None:
        self._sender, self._lease = sender, lease

    async def recall(self, sample: int) -> Recalled:
        """Return what earlier leases recorded of a sample.

        Raises:
            EpisodeError: the ingest refused to say, such as for a lost lease.
        """
        lease = self._lease
        asked = Recall(group=lease.group, token=lease.token, epoch=lease.epoch, sample=sample)
        found = decode_payload(await self._send(asked))
        assert isinstance(found, Recalled)
        return found

    async def store(self, call: Call) -> None:
        """Return when a call is on disk; it is sent again until then.

        Raises:
            EpisodeError: it was refused, such as for a lost lease.
        """
        await self._send(call)

    async def _send(self, message: Call | Recall) -> bytes:
        lease = self._lease
        try:
            return await self._sender.send(message, epoch=lease.epoch, group=lease.group, token=lease.token)
        except (Declined, FrameTooLarge) as refusal:
            raise EpisodeError("replay", f"the call cannot be recorded: {refusal}") from None


def recording_of(sender: Sender, lease: Lease, engine: str) -> Recording:
    """Return what records the calls of a leased group that an engine generates."""
    return Recording(CallSender(sender, lease), lease.group, lease.token, lease.epoch, engine, lease.version)

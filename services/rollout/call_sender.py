"""Sends the calls of leased groups to the ingest, and fetches the calls that earlier leases recorded."""

from collections.abc import Callable

from protocol.codec import decode_payload
from protocol.errors import LEASE_LOST, EpisodeError, FrameTooLarge
from protocol.messages import Call, Recall, Recalled
from rollout.sessions.record import Recording
from services.bus.sender import Declined, Sender
from services.ledger.interface import Lease


class CallSender:
    """Sends and recalls the calls of one leased group."""

    def __init__(self, sender: Sender, lease: Lease, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` with the reason when the ingest refuses a message because the lease is lost."""
        self._sender, self._lease, self._on_lost = sender, lease, on_lost

    async def recall(self, sample: int) -> Recalled:
        """Return the calls of a sample that earlier leases recorded.

        Raises:
            EpisodeError: the ingest refuses to answer, for example because the lease is lost.
        """
        lease = self._lease
        request = Recall(group=lease.group, token=lease.token, epoch=lease.epoch, sample=sample)
        reply = decode_payload(await self._send(request))
        assert isinstance(reply, Recalled)
        return reply

    async def store(self, call: Call) -> None:
        """Send a call until the ingest acknowledges that the call is on disk.

        Raises:
            EpisodeError: the ingest refuses the call, for example because the lease is lost.
        """
        await self._send(call)

    async def _send(self, message: Call | Recall) -> bytes:
        lease = self._lease
        try:
            return await self._sender.send(message, epoch=lease.epoch, group=lease.group, token=lease.token)
        except (Declined, FrameTooLarge) as refusal:
            if isinstance(refusal, Declined) and refusal.why.partition(":")[0] in LEASE_LOST:
                self._on_lost(refusal.why)
            raise EpisodeError("replay", f"the call cannot be recorded: {refusal}") from None


def make_recording(sender: Sender, lease: Lease, engine: str, on_lost: Callable[[str], None]) -> Recording:
    """Return the recorder of a leased group's calls; `on_lost` as in `CallSender`."""
    journal = CallSender(sender, lease, on_lost)
    return Recording(journal, lease.group, lease.token, lease.epoch, engine, lease.version)

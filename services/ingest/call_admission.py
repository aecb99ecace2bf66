"""Journals the calls of sessions: stores each call before it is answered, and returns it to later leases.

The first message of a lease asks the ledger whether the lease is held. The spool then stores the holder and
refuses messages of other leases.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from protocol.codec import decode_payload, encode_payload
from protocol.errors import LEASE_LOST, ProtocolError, Refused, SpoolError
from protocol.messages import Call, Recall
from protocol.rollout_view import MAX_GROUPS, check_logprobs, checked_array, require
from services.bus.receiver import Delivery, Receiver
from services.ledger.interface import Ledger
from services.runtime.process import Process
from services.runtime.writing import retry_until_written
from trainer.storage.call_store import NOT_HELD, CallStore, recalled
from trainer.storage.spool import Spool

RETENTION_S = 3600.0
"""Seconds to keep calls of ended groups, in addition to twice `environment.episode_s`.

The session of an ended group may still run and send a record that refers to the calls.
"""


class CallSweep:
    """Deletes the calls of ended groups, some time after the ledger first reported the end."""

    def __init__(
        self,
        ledger: Ledger,
        store: CallStore,
        retention_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep calls for `retention_s` seconds of `clock`, which must be monotonic."""
        self._ledger, self._store, self._retention_s, self._clock = ledger, store, retention_s, clock
        self._ended_s: dict[int, float] = {}
        """Group -> time at which its end was first seen. At most one entry per group with calls."""

    async def sweep(self) -> int:
        """Delete due calls and return their number. If cancelled, they may have been deleted.

        Raises:
            Refused: the ledger does not hold the run.
            SpoolError: the spool cannot be read or written; no call was deleted.
        """
        ended = await self._ledger.ended(await asyncio.to_thread(self._store.unscored_groups))
        now = self._clock()
        self._ended_s = {group: self._ended_s.get(group, now) for group in ended}
        due = [group for group, since in self._ended_s.items() if now - since >= self._retention_s]
        return await asyncio.to_thread(self._store.forget_unscored, due)


log = logging.getLogger("tether.calls")

BATCH = 256
"""Maximum number of messages stored by one fsync."""
SWEEP_S = 60.0
MAX_SAMPLES = 10**5
MAX_NUMBER = 10**9
"""Exclusive upper limit of the numbers of a sample's calls and attempts."""


class CallAdmission:
    """Journal of the edge `calls`; acknowledges messages once they are on disk."""

    def __init__(self, process: Process, receiver: Receiver, spool: Spool) -> None:
        self._process, self._receiver = process, receiver
        self._store = CallStore(spool)
        self._lease_ms = int(process.settings.rollout.lease_s * 1000)

    async def journal_loop(self) -> None:
        """Journal arriving calls in batches of at most `BATCH`, until cancelled."""
        while True:
            batch = await self._receiver.receive_waiting(BATCH)
            await self._put([delivery for delivery in batch if isinstance(delivery.message, Call)])
            for delivery in batch:
                if isinstance(delivery.message, Recall):
                    await self._recall(delivery, delivery.message)

    async def sweep_loop(self) -> None:
        """Delete calls of groups that ended without a score, until cancelled.

        The trainer deletes the calls of groups that it dropped or archived.
        """
        retention_s = RETENTION_S + 2 * self._process.settings.environment.episode_s
        sweep = CallSweep(self._process.ledger, self._store, retention_s)
        while True:
            try:
                if count := await sweep.sweep():
                    log.info("calls.forgotten calls=%d", count)
            except SpoolError as error:
                log.error("calls.sweep_failed error=%s", error)
            await asyncio.sleep(SWEEP_S)

    async def _put(self, batch: Sequence[Delivery]) -> None:
        """Store calls with one fsync; ask the ledger about leases that the spool does not know."""
        calls = [(item, call) for item in batch if (call := self._check_call(item)) is not None]
        for is_last in (False, True):
            if not calls:
                return
            rows = [(call, bytes(delivery.envelope.payload)) for delivery, call in calls]
            reasons = await retry_until_written(self._process, functools.partial(self._store.put_many, rows))
            unknown = []
            for (delivery, call), reason in zip(calls, reasons, strict=True):
                if not reason:
                    self._process.metrics.count("calls.stored")
                    self._receiver.ack(delivery)
                elif reason == NOT_HELD and not is_last:
                    unknown.append((delivery, call))
                else:
                    self._refuse(delivery, reason)
            calls = [item for item in unknown if await self._hold(item[0], item[1].group, item[1].token)]

    async def _recall(self, delivery: Delivery, recall: Recall) -> None:
        if not 0 <= recall.group < MAX_GROUPS or not 0 <= recall.sample < MAX_SAMPLES:
            self._refuse(delivery, f"group {recall.group} or sample {recall.sample} is out of range")
        elif await self._hold(delivery, recall.group, recall.token):
            payloads = await retry_until_written(
                self._process, lambda: self._store.recall(recall.group, recall.sample)
            )
            calls = [call for data in payloads if isinstance(call := decode_payload(data), Call)]
            found = recalled(calls, recall.epoch)
            self._process.metrics.count("calls.recalled", len(found.calls))
            self._receiver.answer(delivery, encode_payload(found))

    async def _hold(self, delivery: Delivery, group: int, token: str) -> bool:
        """Return whether the ledger confirms a lease, and store the holder; else refuse the message.

        The query extends the lease: the ledger has no other query about a lease.
        """
        if await retry_until_written(self._process, lambda: self._store.is_held(group, token)):
            return True
        try:
            await self._process.ledger.extend(group, token, self._lease_ms)
        except Refused as refusal:
            if refusal.reason not in LEASE_LOST:
                raise
            self._refuse(delivery, str(refusal))
            return False
        await retry_until_written(self._process, lambda: self._store.hold(group, token))
        return True

    def _check_call(self, delivery: Delivery) -> Call | None:
        """Return a call that can be replayed; refuse other calls and return None."""
        call = delivery.message
        assert isinstance(call, Call)
        try:
            check_call(call)
        except ProtocolError as error:
            self._refuse(delivery, str(error))
            return None
        return call

    def _refuse(self, delivery: Delivery, why: str) -> None:
        self._process.metrics.count("calls.refused")
        log.info("call.refused group=%d why=%s", delivery.envelope.group, why)
        self._receiver.refuse(delivery, why)


def check_call(call: Call) -> None:
    """Check the numbers and arrays of a call or a tool result for consistency.

    Raises:
        ProtocolError: a field is out of range or contradicts another field; the message names group and
            field.
    """
    group = call.group
    require(0 <= group < MAX_GROUPS, group, "group", "is out of range")
    require(0 <= call.sample < MAX_SAMPLES, group, "sample", f"is {call.sample}")
    require(0 <= call.number < MAX_NUMBER, group, "number", f"is {call.number}")
    # attempts that end before their first call have no number, so `number` may be below `attempt`
    require(0 <= call.attempt < MAX_NUMBER, group, "attempt", f"is {call.attempt} of call {call.number}")
    require(-1 <= call.parent < call.number, group, "parent", f"is {call.parent} of call {call.number}")
    tokens = checked_array(group, "tokens", call.tokens, "int32", (None,))
    if call.name or call.result:
        _check_result(call)
        return
    inserted = checked_array(group, "inserted", call.inserted, "int32", (None,))
    logprobs = checked_array(group, "logprobs", call.logprobs, "float32", (len(tokens),))
    spans = checked_array(group, "spans", call.spans, "int32", (None, 2))
    require(len(tokens) > 0 and bool((tokens >= 0).all()), group, "tokens", "are empty or negative")
    require(bool((inserted >= 0).all()), group, "inserted", "has a negative token")
    check_logprobs(group, logprobs, lambda _: call.sample)
    ends = np.diff(spans[:, 0], prepend=0)
    covers = len(spans) > 0 and bool((ends > 0).all()) and spans[-1, 0] == len(tokens)
    require(covers and bool((spans[:, 1] >= 0).all()), group, "spans", f"do not cover {len(tokens)} tokens")


def _check_result(call: Call) -> None:
    require(bool(call.name) and bool(call.result), call.group, "result", "needs both name and result")
    for name in ("inserted", "tokens", "logprobs", "spans"):
        require(not getattr(call, name).data, call.group, name, "is not empty, and the call is a result")

"""Admits scored groups: checks them, stores them in the spool, and has the ledger accept them."""

import logging
from collections.abc import Sequence
from functools import partial

from protocol.errors import LEASE_LOST, ProtocolError, Reason, Refused
from protocol.messages import ScoredRollout, ScoreFailure
from services.bus.receiver import Delivery, Receiver
from services.ledger.interface import TakenGroup
from services.ledger.limits import MAX_DETAIL
from services.ledger_recovery.journal_entries import accept_entry
from services.observability.busy import BusyMeter
from services.runtime.process import Process
from services.runtime.user_modules import add_user_modules
from services.runtime.writing import retry_until_written
from trainer.data.group_filter import group_filter
from trainer.data.samples import check_scored, mean_reward
from trainer.storage.spool import Spool

log = logging.getLogger("tether.ingest")

BATCH = 64
"""Maximum number of messages stored by one fsync."""
ENDED_LEASE_REASONS = frozenset({Reason.NOT_HELD, Reason.WRONG_STATE, Reason.UNKNOWN_GROUP, Reason.DUPLICATE})
"""Reasons for which a release is refused because the lease is already over."""


Checked = tuple[Delivery, ScoredRollout, dict[int, int]]
"""A trainable rollout, with its number of tokens per version."""


class Admission:
    """Receives messages on the edge `scored`, and acknowledges them once stored and accepted."""

    def __init__(self, process: Process, receiver: Receiver, spool: Spool) -> None:
        self._process = process
        self._receiver = receiver
        self._spool = spool
        self._meter = BusyMeter()
        add_user_modules(process.settings)
        self._passes_filter = group_filter(process.settings.algorithm)
        process.on_heartbeat.append(lambda: process.info.update(self._meter.reading()))

    async def admit_loop(self) -> None:
        """Admit arriving messages in batches of at most `BATCH`, until cancelled."""
        while True:
            batch = await self._receiver.receive_waiting(BATCH)
            with self._meter.working():
                await self._admit(batch)

    async def _admit(self, batch: Sequence[Delivery]) -> None:
        """Store a batch (one fsync), accept its groups, journal the accepts (one fsync), then acknowledge."""
        process = self._process
        head = await process.ledger.head()
        checked = await self._with_signal(await self._check_batch(batch, head.version))
        if not checked:
            return
        records = [
            (message.rollout.group, message.rollout.token, bytes(delivery.envelope.payload))
            for delivery, message, _ in checked
        ]
        stored = await retry_until_written(process, partial(self._spool.put_many, records))
        accepted, refused = list[tuple[Delivery, TakenGroup]](), list[tuple[Delivery, str]]()
        unneeded = set[tuple[int, str]]()
        for delivery, message, counts in checked:
            try:
                accepted.append((delivery, await self._accept(message, counts)))
            except Refused as refusal:
                process.metrics.count(f"accept.refused.{refusal.reason}")
                refused.append((delivery, str(refusal)))
                if refusal.reason in LEASE_LOST:  # no checkpoint may ever cover this record
                    unneeded.add((message.rollout.group, message.rollout.token))
        if accepted:
            sequence = (await process.ledger.head()).sequence
            entry = accept_entry(head.epoch, [group for _, group in accepted], sequence)
            await retry_until_written(process, partial(self._spool.append, [entry]))
        for delivery, _ in accepted:
            process.metrics.count("accepted")
            self._receiver.ack(delivery)
        # records that existed before, or whose duplicate was accepted, may be trained on
        if unneeded := (unneeded & stored) - {(group.group, group.token) for _, group in accepted}:
            await retry_until_written(process, partial(self._spool.remove, unneeded))
        for delivery, why in refused:
            self._receiver.refuse(delivery, why)

    async def _check_batch(self, batch: Sequence[Delivery], version: int) -> list[Checked]:
        """Return the trainable rollouts with their tokens per version; release or refuse all others."""
        checked = []
        for delivery in batch:
            message = delivery.message
            if isinstance(message, ScoreFailure):
                await self._release(delivery, message)
            elif isinstance(message, ScoredRollout):
                try:
                    checked.append((delivery, message, check_scored(message, version)))
                except ProtocolError as error:
                    self._process.metrics.count("scored.malformed")
                    log.warning("scored.malformed group=%d error=%s", message.rollout.group, error)
                    self._receiver.refuse(delivery, str(error))
        return checked

    async def _with_signal(self, checked: Sequence[Checked]) -> list[Checked]:
        """Return the groups to train on; drop the groups that `algorithm.filter_groups` excludes."""
        deliveries_with_signal = []
        for delivery, message, counts in checked:
            if not self._passes_filter(message):
                await self._filter(delivery, message, sum(counts.values()))
            else:
                deliveries_with_signal.append((delivery, message, counts))
        return deliveries_with_signal

    async def _filter(self, delivery: Delivery, message: ScoredRollout, tokens: int) -> None:
        """Drop a filtered group in the ledger and acknowledge it without storing it."""
        process, rollout = self._process, message.rollout
        max_batches = process.settings.algorithm.max_filtered_batches
        try:
            reward = mean_reward(message)
            await process.ledger.filter(rollout.group, rollout.token, tokens, reward, max_batches)
        except Refused as refusal:
            process.metrics.count(f"filter.refused.{refusal.reason}")
            self._receiver.refuse(delivery, str(refusal))
            return
        process.metrics.count("groups.filtered")
        process.metrics.count("tokens.filtered", tokens)
        self._receiver.ack(delivery)

    async def _accept(self, message: ScoredRollout, counts: dict[int, int]) -> TakenGroup:
        """Return the group as accepted by the ledger. Raises Refused."""
        rollout = message.rollout
        return await self._process.ledger.accept(rollout.group, rollout.token, counts, mean_reward(message))

    async def _release(self, delivery: Delivery, failure: ScoreFailure) -> None:
        """Release a group whose scoring failed. A failure is never converted to a reward.

        The ledger drops the group after `max_attempts` leases.
        """
        log.warning(
            "score.failed group=%d verifier=%s error=%s", failure.group, failure.verifier, failure.error
        )
        self._process.metrics.count("score.failed")
        try:
            reason = f"reward:{failure.verifier}: {failure.error}"[:MAX_DETAIL]
            await self._process.ledger.release(failure.group, failure.token, reason)
        except Refused as refusal:
            if refusal.reason not in ENDED_LEASE_REASONS:
                raise
        self._receiver.ack(delivery)

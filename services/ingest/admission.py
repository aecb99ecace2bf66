"""Admits scored groups to the run: checks them, stores them in the spool, and has the ledger accept them."""

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
from services.runtime.writing import until_written
from trainer.data.group_filter import group_filter
from trainer.data.samples import check_scored, mean_reward
from trainer.storage.spool import Spool

log = logging.getLogger("tether.ingest")

BATCH = 64
"""Messages stored by one fsync."""
NOT_HELD_ANY_MORE = frozenset({Reason.NOT_HELD, Reason.WRONG_STATE, Reason.UNKNOWN_GROUP, Reason.DUPLICATE})
"""Refusals of a release that say that the lease is over already."""


Checked = tuple[Delivery, ScoredRollout, dict[int, int]]
"""A rollout that can be trained on, with its tokens per version."""


class Admission:
    """Takes messages from the edge `scored` and acknowledges those that are stored and accepted."""

    def __init__(self, process: Process, receiver: Receiver, spool: Spool) -> None:
        self._process = process
        self._receiver = receiver
        self._spool = spool
        self._meter = BusyMeter()
        add_user_modules(process.settings)
        self._keeps = group_filter(process.settings.algorithm)
        process.on_heartbeat.append(lambda: process.info.update(self._meter.reading()))

    async def admit_loop(self) -> None:
        """Admit arriving records, in batches of the waiting ones, until cancelled."""
        while True:
            batch = await self._receiver.receive_waiting(BATCH)
            with self._meter.working():
                await self._admit(batch)

    async def _admit(self, batch: Sequence[Delivery]) -> None:
        """Store a batch with one fsync, accept its groups, journal that with one fsync, then acknowledge."""
        process = self._process
        head = await process.ledger.head()
        checked = await self._with_signal(await self._checked(batch, head.version))
        if not checked:
            return
        records = [
            (message.rollout.group, message.rollout.token, bytes(delivery.envelope.payload))
            for delivery, message, _ in checked
        ]
        stored = await until_written(process, partial(self._spool.put_many, records))
        accepted, refused = list[tuple[Delivery, TakenGroup]](), list[tuple[Delivery, str]]()
        needless = set[tuple[int, str]]()
        for delivery, message, counts in checked:
            try:
                accepted.append((delivery, await self._accept(message, counts)))
            except Refused as refusal:
                process.metrics.count(f"accept.refused.{refusal.reason}")
                refused.append((delivery, str(refusal)))
                if refusal.reason in LEASE_LOST:  # a checkpoint may never cover that group
                    needless.add((message.rollout.group, message.rollout.token))
        if accepted:
            sequence = (await process.ledger.head()).sequence
            entry = accept_entry(head.epoch, [group for _, group in accepted], sequence)
            await until_written(process, partial(self._spool.append, [entry]))
        for delivery, _ in accepted:
            process.metrics.count("accepted")
            self._receiver.ack(delivery)
        # what was there before, or came twice and was accepted once, may be trained on
        if needless := (needless & stored) - {(group.group, group.token) for _, group in accepted}:
            await until_written(process, partial(self._spool.remove, needless))
        for delivery, why in refused:
            self._receiver.refuse(delivery, why)

    async def _checked(self, batch: Sequence[Delivery], version: int) -> list[Checked]:
        """Return the rollouts that can be trained on, with their tokens per version; finish the others."""
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
        """Return the groups to train on; with `algorithm.filter_groups` the others are dropped."""
        deliveries_with_signal = []
        for delivery, message, counts in checked:
            if not self._keeps(message):
                await self._filter(delivery, message, sum(counts.values()))
            else:
                deliveries_with_signal.append((delivery, message, counts))
        return deliveries_with_signal

    async def _filter(self, delivery: Delivery, message: ScoredRollout, tokens: int) -> None:
        """Have the ledger drop a group that is not to be trained, and acknowledge it without storing it."""
        process, rollout = self._process, message.rollout
        most = process.settings.algorithm.max_filtered_batches
        try:
            await process.ledger.filter(rollout.group, rollout.token, tokens, mean_reward(message), most)
        except Refused as refusal:
            process.metrics.count(f"filter.refused.{refusal.reason}")
            self._receiver.refuse(delivery, str(refusal))
            return
        process.metrics.count("groups.filtered")
        process.metrics.count("tokens.filtered", tokens)
        self._receiver.ack(delivery)

    async def _accept(self, message: ScoredRollout, counts: dict[int, int]) -> TakenGroup:
        """Return the group as the ledger accepted it. Raises Refused."""
        rollout = message.rollout
        return await self._process.ledger.accept(rollout.group, rollout.token, counts, mean_reward(message))

    async def _release(self, delivery: Delivery, failure: ScoreFailure) -> None:
        """Hand a group back whose scoring failed; a failure is never a reward.

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
            if refusal.reason not in NOT_HELD_ANY_MORE:
                raise
        self._receiver.ack(delivery)

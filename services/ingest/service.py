"""`python -m services.ingest`: the trainer's front door. Lives on while the trainer restarts.

Consumes: `ScoredRollout` and `ScoreFailure`. Produces: spool records, ledger transitions, the audit archive.
Keeps the ledger whole (`services/ledger_recovery/reconcile.py`). Acknowledged means: on disk, and accepted by
the ledger. A message that cannot be put on disk is not acknowledged; its sender keeps it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from protocol.codec import encode_payload
from protocol.errors import ProtocolError, Reason, Refused, TetherError
from protocol.messages import ScoredRollout, ScoreFailure
from protocol.topics import SCORED, Role
from services.bus.receiver import Delivery, Receiver
from services.ledger.interface import TakenGroup
from services.ledger_recovery.journal_entries import accept_entry
from services.ledger_recovery.reconcile import LedgerReconciler
from services.runtime.main import service_main
from services.runtime.process import Process
from services.runtime.run_ledger import open_ledger
from trainer.data.samples import samples_of, token_counts
from trainer.storage.spool import Spool

log = logging.getLogger("tether.ingest")
T = TypeVar("T")

ARCHIVE_S = 0.3
BATCH = 64
"""Messages put on disk by one fsync."""
SPOOL_RETRY_S = 1.0


async def serve(process: Process) -> None:
    """Run the ingest until it is stopped."""
    run_dir = process.settings.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    spool = await asyncio.to_thread(Spool, run_dir / "spool.sqlite")
    async with open_ledger(process.settings) as own:
        await _serve(process, spool, LedgerReconciler(own, process.settings, spool))


async def _serve(process: Process, spool: Spool, keeper: LedgerReconciler) -> None:
    try:
        await keeper.reconcile_and_archive()
        await process.ledger.guard()
        async with Receiver(
            SCORED, run=process.run, incarnation=process.incarnation, config=process.settings.bus
        ) as receiver:
            process.metrics.watch("tether_bus_scored", "Bus counters, edge scored", receiver.stats.as_dict)
            process.info["endpoints"] = {SCORED.name: receiver.endpoint}
            await process.register()
            async with asyncio.TaskGroup() as tasks:
                ingest = tasks.create_task(_ingest_loop(process, receiver, spool), name="ingest")
                await _archive_loop(process, keeper)
                ingest.cancel()
        await (
            keeper.archive_all()
        )  # not after an error, which it might hide: the next ingest goes on where the archive ends
    finally:
        await asyncio.to_thread(spool.close)


async def _archive_loop(process: Process, keeper: LedgerReconciler) -> None:
    """Move the ledger's events into the run directory until the process is to stop; leasing stops if this
    falls behind."""
    while not await process.stopped_within(ARCHIVE_S):
        try:
            process.metrics.count("events.archived", await keeper.reconcile_and_archive())
        except OSError as error:
            process.metrics.count("archive.failed")
            log.error("archive.failed error=%s", error)


async def _ingest_loop(process: Process, receiver: Receiver, spool: Spool) -> None:
    while True:
        batch = [await receiver.receive()]
        while receiver.waiting and len(batch) < BATCH:
            batch.append(await receiver.receive())
        await _ingest(process, receiver, spool, batch)


async def _ingest(process: Process, receiver: Receiver, spool: Spool, batch: Sequence[Delivery]) -> None:
    """Check, put on disk with one fsync, accept one by one, note that in the journal with one fsync, then
    acknowledge."""
    head = await process.ledger.head()
    good: list[tuple[Delivery, ScoredRollout, dict[int, int]]] = []
    for delivery in batch:
        message = delivery.message
        if isinstance(message, ScoreFailure):
            await _fail(process, receiver, delivery, message)
        elif isinstance(message, ScoredRollout):
            try:
                good.append((delivery, message, check_scored(message, head.version)))
            except ProtocolError as error:
                process.metrics.count("scored.malformed")
                log.warning("scored.malformed group=%d error=%s", message.rollout.group, error)
                receiver.refuse(delivery, str(error))
    if not good:
        return
    records = [
        (message.rollout.group, message.rollout.token, encode_payload(message)) for _, message, _ in good
    ]
    await _on_disk(process, spool.put_many, records)
    accepted = [
        (delivery, group)
        for delivery, message, counts in good
        if (group := await _accept(process, receiver, delivery, message, counts))
    ]
    if accepted:
        sequence = (await process.ledger.head()).sequence
        await _on_disk(
            process, spool.append, [accept_entry(head.epoch, [group for _, group in accepted], sequence)]
        )
    for delivery, _ in accepted:
        process.metrics.count("accepted")
        receiver.ack(delivery)


async def _on_disk(process: Process, write: Callable[[list[T]], object], rows: list[T]) -> None:
    """Write to the spool; again and again while the disk is full: senders keep what is not acknowledged."""
    while True:
        try:
            await asyncio.to_thread(write, rows)
            return
        except TetherError as error:
            process.metrics.count("spool.failed")
            log.error("spool.failed rows=%d error=%s", len(rows), error)
            with process.waiting("spool"):
                await asyncio.sleep(SPOOL_RETRY_S)


def check_scored(message: ScoredRollout, version: int) -> dict[int, int]:
    """Sampled tokens per version of a scored rollout, if the trainer will be able to train on it.

    Args:
        message: as received.
        version: the committed version; no token can be of a later one.

    Raises:
        ProtocolError: if an array contradicts another, or a number is not finite; names group and field.
    """
    for _ in samples_of(message, 0, 0, version):
        pass
    return token_counts(message.rollout)


async def _accept(
    process: Process, receiver: Receiver, delivery: Delivery, message: ScoredRollout, counts: dict[int, int]
) -> TakenGroup | None:
    """The group as the ledger has accepted it; None if it refuses, and the sender is told."""
    rollout = message.rollout
    try:
        return await process.ledger.accept(
            rollout.group, rollout.token, counts, round(float(message.rewards.numpy().mean()), 6)
        )
    except Refused as refusal:
        process.metrics.count(f"accept.refused.{refusal.reason}")
        receiver.refuse(delivery, str(refusal))
        return None


async def _fail(process: Process, receiver: Receiver, delivery: Delivery, failure: ScoreFailure) -> None:
    """A failed score hands the group back; after `max_attempts` leases the ledger drops it. It is never a
    reward."""
    log.warning("score.failed group=%d verifier=%s error=%s", failure.group, failure.verifier, failure.error)
    process.metrics.count("score.failed")
    try:
        await process.ledger.release(failure.group, failure.token, f"reward:{failure.verifier}")
    except Refused as refusal:
        if refusal.reason not in (
            Reason.NOT_HELD,
            Reason.WRONG_STATE,
            Reason.UNKNOWN_GROUP,
            Reason.DUPLICATE,
        ):
            raise
    receiver.ack(delivery)


def main() -> None:
    """Run `python -m services.ingest`."""
    service_main(Role.INGEST, serve)

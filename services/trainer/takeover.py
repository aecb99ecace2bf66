"""How a trainer takes a run over: fence the old one, load the newest checkpoint, replay what was committed
since, continue or rewind.

Steps r..V-1 are replayed from the spool with their recorded groups. If the weights then have the digest that
the ledger recorded for V, the branch continues and nothing is lost. Else the ledger is rewound to r, and what
was made under abandoned versions is made again.
"""

import asyncio
import logging

from protocol.codec import encode_payload
from protocol.errors import SettingsError
from protocol.messages import WeightManifest
from services.ledger.interface import LedgerStatus, Taken
from services.trainer.leader import LeaderRank
from trainer.storage.checkpoints import Checkpoint

log = logging.getLogger("tether.recovery")


async def take_over(rank: LeaderRank) -> WeightManifest:
    """Claim the run for this trainer's epoch and bring the model to the version that the run goes on from.
    Returns its manifest.

    Raises:
        SettingsError: if all checkpoints are ahead of the ledger (another Redis, or one that lost writes).
    """
    ledger = rank.process.ledger
    status = await ledger.claim(rank.epoch)
    # A trainer that was still saving when it was succeeded may have left one of a branch that was abandoned,
    # newer or of the same version.
    digests = {record.step + 1: record.digest for record in await ledger.step_records(0)}
    found = rank.checkpoints.latest(at_most=status.version, digests=digests)
    start = found.version if found else 0
    newest = rank.checkpoints.latest(verify=False)
    if found is None and newest is not None:
        raise SettingsError(
            f"the newest checkpoint is of version {newest.version}, but the ledger stands at {status.version}: this is not the ledger that "
            "the run was made with, or it lost writes; point TETHER_REDIS_URL at the right one, or start in a new run directory"
        )
    if rank.process.settings.algorithm.kl_coef > 0:
        await rank.on_compute(rank.keep_reference)
    if found:
        await rank.on_compute(rank.restore, found.directory)
    manifest = await _replay(rank, status, start)
    if manifest is None or not await ledger.resume(rank.epoch, status.version, manifest.digest):
        manifest = await _rewind(rank, status, found)
    if found is None and manifest.version == 0:
        await rank.on_compute(
            rank.save, 0, manifest.digest, status.sequence
        )  # so that there is always one to go back to
    await ledger.publish(rank.epoch, encode_payload(manifest), manifest.version)
    rank.caster.publish(manifest, epoch=rank.epoch)
    return manifest


async def _replay(rank: LeaderRank, status: LedgerStatus, start: int) -> WeightManifest | None:
    """Repeat the committed steps since `start`; None if the spool does not hold them or the weights come out
    different."""
    reached, recorded = start, None
    for record in await rank.process.ledger.step_records(start):
        try:
            command = await asyncio.to_thread(rank.command_for, Taken(step=record.step, groups=record.groups))
        except LookupError as error:
            log.warning("replay.missing step=%d error=%s", record.step, error)
            return None
        await rank.on_compute(rank.train, command)
        reached, recorded = record.step + 1, record
        log.info("replay.step step=%d", record.step)
    if reached != status.version:
        log.warning("replay.incomplete reached=%d ledger=%d", reached, status.version)
        return None
    manifest = await rank.on_compute(rank.publish, reached)
    if recorded and manifest.digest != recorded.digest:
        log.warning("replay.differs version=%d", reached)
        return None
    return manifest


async def _rewind(rank: LeaderRank, status: LedgerStatus, found: Checkpoint | None) -> WeightManifest:
    if found is None:
        raise SettingsError(
            f"the ledger stands at version {status.version}, but there is no checkpoint in this run directory and its steps cannot be "
            "repeated: give the directory that the run was made in"
        )
    await rank.on_compute(rank.restore, found.directory)
    manifest = await rank.on_compute(rank.publish, found.version)
    await rank.process.ledger.resume(rank.epoch, found.version, manifest.digest)
    log.warning("run.rewound from=%d to=%d", status.version, found.version)
    return manifest

"""How a trainer takes a run over: fence the old one, load the newest checkpoint, replay what was committed since, continue or rewind.

Steps r..V-1 are replayed from the spool with their recorded groups. If the weights then have the digest that the ledger recorded for V,
the branch continues and nothing is lost. Else the ledger is rewound to r, and what was made under abandoned versions is made again.
"""

import logging

from protocol.codec import encode_payload
from protocol.errors import SettingsError
from protocol.messages import WeightManifest
from services.ledger.interface import LedgerStatus, Taken
from services.training import Trainer

log = logging.getLogger("tether.recovery")


async def take_over(trainer: Trainer) -> WeightManifest:
    """Claim the run for this trainer's epoch and bring the model to the version that the run goes on from. Returns its manifest.

    Raises:
        SettingsError: if the newest checkpoint is ahead of the ledger (another Redis, or one that lost writes).
    """
    ledger = trainer.process.ledger
    status = await ledger.claim(trainer.epoch)
    found = trainer.checkpoints.latest()
    start = found.version if found else 0
    if start > status.version:
        raise SettingsError(
            f"the newest checkpoint is of version {start}, but the ledger stands at {status.version}: "
            "this is not the ledger that the run was "
            f"made with, or it lost writes; point TETHER_REDIS_URL at the right one, or start in a new run directory"
        )
    if trainer.process.settings.algorithm.kl_coef > 0:
        await trainer.on_compute(trainer.keep_reference)
    if found:
        await trainer.on_compute(trainer.restore, found.directory)
    manifest = await _replay(trainer, status, start)
    if manifest is None or not await ledger.resume(trainer.epoch, status.version, manifest.digest):
        manifest = await _rewind(trainer, status, start)
    await ledger.publish(trainer.epoch, encode_payload(manifest), manifest.version)
    trainer.caster.publish(manifest, epoch=trainer.epoch)
    return manifest


async def _replay(trainer: Trainer, status: LedgerStatus, start: int) -> WeightManifest | None:
    """Repeat the committed steps since `start`; None if the spool does not hold them or the weights come out different."""
    recorded = None
    for record in await trainer.process.ledger.step_records(start):
        try:
            command = trainer.command_for(Taken(step=record.step, groups=record.groups))
        except LookupError as error:
            log.warning("replay.missing step=%d error=%s", record.step, error)
            return None
        await trainer.on_compute(trainer.train, command)
        recorded = record
        log.info("replay.step step=%d", record.step)
    if (recorded.step + 1 if recorded else start) != status.version:
        log.warning("replay.incomplete reached=%d ledger=%d", recorded.step + 1 if recorded else start, status.version)
        return None
    manifest = await trainer.on_compute(trainer.publish, status.version)
    if recorded and manifest.digest != recorded.digest:
        log.warning("replay.differs version=%d", status.version)
        return None
    return manifest


async def _rewind(trainer: Trainer, status: LedgerStatus, start: int) -> WeightManifest:
    found = trainer.checkpoints.latest()
    await trainer.on_compute(trainer.restore, found.directory if found else trainer.checkpoints.initial)
    manifest = await trainer.on_compute(trainer.publish, start)
    await trainer.process.ledger.resume(trainer.epoch, start, manifest.digest)
    log.warning("run.rewound from=%d to=%d", status.version, start)
    return manifest

"""Takes a run over: fences the trainer before, loads the newest checkpoint, replays the steps since.

Steps r..V-1 are replayed from the spool with their recorded groups. If the weights then have the digest that
the ledger recorded for V, the branch continues and no step is lost. Else the ledger is rewound to r, and
groups and steps of abandoned versions are made again.
"""

import asyncio
import logging

from protocol.codec import encode_payload
from protocol.errors import ProtocolError, SettingsError, TetherError
from protocol.ids import new_epoch
from protocol.messages import WeightManifest
from services.ledger.interface import LedgerStatus, Taken
from services.trainer.checkpointing import Checkpointer
from services.trainer.model_runner import ModelRunner
from services.trainer.open_run import OpenRun
from trainer.execution.commands import KeepReferenceCommand
from trainer.storage.checkpoints import Checkpoint
from trainer.storage.stored import MissingRecords

log = logging.getLogger("tether.recovery")


async def take_over(run: OpenRun, runner: ModelRunner, checkpointer: Checkpointer) -> WeightManifest:
    """Claim the run for this trainer's epoch and bring the model to the version that the run continues from.

    Returns:
        The manifest of that version, which is published and announced.

    Raises:
        SettingsError: all checkpoints are ahead of the ledger (another Redis, or one that lost writes).
    """
    ledger = run.process.ledger
    status = await ledger.claim(run.epoch)
    # A trainer that was still saving when it was fenced may have left a checkpoint of an abandoned branch,
    # newer or of the same version.
    digests = {record.step + 1: record.digest for record in await ledger.step_records(0)}
    checkpoint = run.checkpoints.latest(at_most=status.version, digests=digests)
    start = checkpoint.version if checkpoint else 0
    newest = run.checkpoints.latest(verify=False)
    if checkpoint is None and newest is not None:
        raise SettingsError(
            f"the newest checkpoint is of version {newest.version}, but the ledger is at {status.version}: "
            "this is not the ledger that the run was made with, or it lost writes; point TETHER_REDIS_URL at "
            "the right one, or start in a new run directory"
        )
    if run.process.settings.algorithm.kl_coef > 0:
        await runner.carry_out(KeepReferenceCommand())
    if checkpoint:
        await runner.restore(checkpoint.directory)
    manifest = await _replay(run, runner, status, start)
    if manifest is None or not await ledger.resume(run.epoch, status.version, manifest.digest):
        manifest = await _rewind(run, runner, status, checkpoint)
    if checkpoint is None and manifest.version == 0:  # so that there is always one to go back to
        await checkpointer.save(0, manifest.digest, status.sequence)
    await _announce(run, manifest)
    return manifest


async def reclaim(
    run: OpenRun, runner: ModelRunner, manifest: WeightManifest, error: MissingRecords
) -> WeightManifest:
    """Give back a batch with untrainable groups, and hold the run under a new epoch.

    Those groups are `lost` and generated again. The model stays as it is: it has the committed version.

    Args:
        run: gets the new epoch.
        runner: publishes the version again.
        manifest: the version's.
        error: the groups.

    Returns:
        The manifest under the new epoch, which is announced.

    Raises:
        Refused: STALE_EPOCH, another trainer holds the run.
        TetherError: the export differs from the committed one.
    """
    ledger = run.process.ledger
    for cause in error.causes.values():
        log.error("group.lost %s", cause)
    await ledger.take(run.epoch)  # refuses if another trainer has taken the run over meanwhile
    run.epoch = new_epoch()
    status = await ledger.claim(run.epoch)
    for group, token in error.causes:
        await ledger.lost(group, token)
    run.process.metrics.count("groups.lost", len(error.causes))
    again = await runner.publish(run.epoch, manifest.version)
    if again.digest != manifest.digest or not await ledger.resume(run.epoch, status.version, again.digest):
        raise TetherError(
            f"version {manifest.version} was exported again and is not what was committed; the trainer "
            "starts again"
        )
    await _announce(run, again)
    return again


async def _announce(run: OpenRun, manifest: WeightManifest) -> None:
    """Let the engines of this epoch know the version that the run continues from."""
    await run.process.ledger.publish(run.epoch, encode_payload(manifest), manifest.version)
    run.broadcaster.publish(manifest, epoch=run.epoch)


async def _replay(
    run: OpenRun, runner: ModelRunner, status: LedgerStatus, start: int
) -> WeightManifest | None:
    """Repeat the committed steps since `start` and publish; None if the ledger's weights cannot be reached.

    That is so if the spool does not hold the groups as they were received, or the weights come out
    different.
    """
    reached, recorded = start, None
    for record in await run.process.ledger.step_records(start):
        try:
            command = await asyncio.to_thread(run.read_command, Taken(step=record.step, groups=record.groups))
            await runner.train(command)
        except (MissingRecords, ProtocolError) as error:
            log.warning("replay.missing step=%d error=%s", record.step, error)
            return None
        reached, recorded = record.step + 1, record
        log.info("replay.step step=%d", record.step)
    if reached != status.version:
        log.warning("replay.incomplete reached=%d ledger=%d", reached, status.version)
        return None
    manifest = await runner.publish(run.epoch, reached)
    if recorded and manifest.digest != recorded.digest:
        log.warning("replay.differs version=%d", reached)
        return None
    return manifest


async def _rewind(
    run: OpenRun, runner: ModelRunner, status: LedgerStatus, checkpoint: Checkpoint | None
) -> WeightManifest:
    """Rewind model and ledger to a checkpoint, and publish its version."""
    if checkpoint is None:
        raise SettingsError(
            f"the ledger is at version {status.version}, but this run directory has no checkpoint and the "
            "steps cannot be repeated: give the directory that the run was made in"
        )
    await runner.restore(checkpoint.directory)
    manifest = await runner.publish(run.epoch, checkpoint.version)
    await run.process.ledger.resume(run.epoch, checkpoint.version, manifest.digest)
    log.warning("run.rewound from=%d to=%d", status.version, checkpoint.version)
    return manifest

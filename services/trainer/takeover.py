"""Takes a run over: fences the previous trainer, loads the newest checkpoint, replays later steps.

Steps r..V-1 are replayed from the spool with their recorded groups. If the weights then have the digest that
the ledger recorded for V, the branch continues and no step is lost. Otherwise the ledger is rewound to r, and
groups and steps of abandoned versions are repeated. The version from which the run continues is published
regardless of `trainer.publish_every`; with 0, version 0 is published again.
"""

import asyncio
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

from protocol.codec import encode_payload
from protocol.errors import ProtocolError, SettingsError, TetherError
from protocol.ids import new_epoch
from protocol.messages import WeightManifest
from services.ledger.interface import LedgerStatus, TakenBatch
from services.runtime.writing import retry_while_full
from services.trainer.checkpointing import Checkpointer
from services.trainer.model_runner import ModelRunner
from services.trainer.open_run import ModelVersion, OpenRun
from trainer.execution.commands import KeepReferenceCommand
from trainer.storage.checkpoints import Checkpoint
from trainer.storage.stored import MissingRecords

log = logging.getLogger("tether.recovery")


async def take_over(run: OpenRun, runner: ModelRunner, checkpointer: Checkpointer) -> ModelVersion:
    """Claim the run for this trainer's epoch and restore the version from which the run continues.

    Returns:
        The restored version, and the manifest that is published and announced.

    Raises:
        SettingsError: all checkpoints are ahead of the ledger (another Redis, or one that lost writes).
    """
    ledger = run.process.ledger
    status = await ledger.claim(run.epoch)
    # A fenced trainer may have left a checkpoint of an abandoned branch, newer or of the same version.
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
        await runner.lead(KeepReferenceCommand())
    never = run.process.settings.trainer.publish_every == 0
    initial = await publish(run, runner, 0) if never else None
    if checkpoint:
        await runner.restore(checkpoint.directory)
    model = await _replay(run, runner, status, start, initial)
    if model is None or not await ledger.resume(run.epoch, status.version, model.digest):
        model = await _rewind(run, runner, status, checkpoint, initial)
    await checkpointer.remove_exports_after(model.version)
    if checkpoint is None and model.version == 0:  # there must always be a checkpoint to rewind to
        await checkpointer.save(0, model.digest, status.sequence)
    elif checkpoint is not None and checkpoint.version:
        await checkpointer.resume_copies(checkpoint.version)
    await announce(run, model.published)
    return model


async def reclaim(
    run: OpenRun, runner: ModelRunner, model: ModelVersion, error: MissingRecords
) -> ModelVersion:
    """Return a batch with untrainable groups to the ledger, and hold the run under a new epoch.

    The untrainable groups are `lost` and generated again. The model keeps the committed version, which is
    published again.

    Args:
        run: gets the new epoch.
        runner: publishes the version.
        model: the committed version.
        error: names the untrainable groups.

    Returns:
        The version, with its manifest under the new epoch, which is announced.

    Raises:
        Refused: STALE_EPOCH, another trainer holds the run.
        TetherError: the export differs from the committed version, or the engines need the initial weights,
            which the model no longer has.
    """
    ledger = run.process.ledger
    for cause in error.causes.values():
        log.error("group.lost %s", cause)
    await ledger.take(run.epoch)  # refuses if another trainer has taken the run over
    run.epoch = new_epoch()
    status = await ledger.claim(run.epoch)
    for group, token in error.causes:
        await ledger.lost(group, token)
    run.process.metrics.count("groups.lost", len(error.causes))
    if run.process.settings.trainer.publish_every == 0:
        raise TetherError("the trainer starts again, to publish the initial weights under its new epoch")
    republished = await publish(run, runner, model.version)
    digest = republished.digest
    if digest != model.digest or not await ledger.resume(run.epoch, status.version, digest):
        raise TetherError(
            f"version {model.version} was exported again and is not what was committed; the trainer "
            "starts again"
        )
    await announce(run, republished)
    return replace(model, published=republished)


async def publish(run: OpenRun, runner: ModelRunner, version: int) -> WeightManifest:
    """Publish the model's version and return its manifest; retry while the disk is full.

    If shared memory has no room for the version, the trainer ends, since only a user can enlarge it.

    Raises:
        WeightError: publication failed.
        StoppedWaiting: the process is to stop while the disk is full.
        Refused: STALE_EPOCH, another trainer took the run over while the disk was full.
    """
    settings, work = run.process.settings, partial(runner.publish, run.epoch, version)
    if settings.weights.transport not in ("disk", "http"):
        return await work()
    url = settings.weights.url.rstrip("/")

    def find_full_disk(error: Exception) -> Path | str:
        directory = Path(settings.weights.directory or settings.run_dir)
        return url if url and str(error).startswith(url) else directory

    return await retry_while_full(run.process, work, find_full_disk, run.check_ownership)


async def announce(run: OpenRun, manifest: WeightManifest) -> None:
    """Announce to the engines a version that was published without a commit.

    The registry then names this epoch: a running trainer publishes under it.
    """
    run.process.info["epoch"] = run.epoch
    await run.process.ledger.publish(run.epoch, encode_payload(manifest), manifest.version)
    run.broadcaster.publish(manifest, epoch=run.epoch)


async def _replay(
    run: OpenRun, runner: ModelRunner, status: LedgerStatus, start: int, initial: WeightManifest | None
) -> ModelVersion | None:
    """Replay the committed steps since `start` and publish; None if the ledger's weights are not reproduced.

    The replay fails if the spool lacks a group as received, or if the digests differ. If `initial` is given,
    engines keep the initial weights.
    """
    reached, recorded = start, None
    for record in await run.process.ledger.step_records(start):
        try:
            batch = TakenBatch(step=record.step, groups=record.groups)
            command = await asyncio.to_thread(run.read_command, batch)
            await runner.train(command)
        except (MissingRecords, ProtocolError) as error:
            log.warning("replay.missing step=%d error=%s", record.step, error)
            return None
        reached, recorded = record.step + 1, record
        log.info("replay.step step=%d", record.step)
    if reached != status.version:
        log.warning("replay.incomplete reached=%d ledger=%d", reached, status.version)
        return None
    model = await _published(run, runner, reached, initial)
    if recorded and model.digest != recorded.digest:
        log.warning("replay.differs version=%d", reached)
        return None
    return model


async def _published(
    run: OpenRun, runner: ModelRunner, version: int, initial: WeightManifest | None
) -> ModelVersion:
    """Publish the model's version, or only compute its digest if engines keep the `initial` weights."""
    if initial is not None:
        return ModelVersion(version, await runner.digest(), initial)
    manifest = await publish(run, runner, version)
    return ModelVersion(version, manifest.digest, manifest)


async def _rewind(
    run: OpenRun,
    runner: ModelRunner,
    status: LedgerStatus,
    checkpoint: Checkpoint | None,
    initial: WeightManifest | None,
) -> ModelVersion:
    """Rewind model and ledger to a checkpoint; publish its version, or keep the initial weights."""
    if checkpoint is None:
        raise SettingsError(
            f"the ledger is at version {status.version}, but this run directory has no checkpoint and the "
            "steps cannot be repeated: give the directory that the run was made in"
        )
    await runner.restore(checkpoint.directory)
    model = await _published(run, runner, checkpoint.version, initial)
    await run.process.ledger.resume(run.epoch, checkpoint.version, model.digest)
    log.warning("run.rewound from=%d to=%d", status.version, checkpoint.version)
    return model

"""Runs the training loop: take B groups, make one optimizer step, publish the weights, commit, announce.

The order matters. The weights of a new version are complete at their transport before the commit. The commit
creates the version and stores its manifest in one script. Only then is the version announced to the engines.
With `trainer.publish_every` above 1 a version may be committed without being published.

A crash before the commit leaves a version that no other process knows. A crash after the commit leaves a
manifest that engines find in the ledger.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec

from protocol.codec import encode_payload
from protocol.errors import ProtocolError, Reason, Refused, TetherError
from protocol.messages import (
    Action,
    Control,
    StepReport,
    WeightDraft,
    WeightManifest,
)
from protocol.staleness import Bound, Policy, is_published
from protocol.topics import Role
from services.audit.alarms import Alarm
from services.audit.live import LiveAudit
from services.ledger.interface import LedgerStatus, Peer, TakenBatch
from services.ledger_recovery.journal_entries import commit_entry
from services.runtime.writing import retry_until_written
from services.trainer.checkpointing import Checkpointer
from services.trainer.lockstep import find_misplaced_group, wait_for_groups_before
from services.trainer.model_runner import ModelRunner
from services.trainer.open_run import ModelVersion, OpenRun
from services.trainer.snapshots import Snapshots
from services.trainer.step_report import SkipLimit, StepReporter, TrainedStep, excess_mismatch
from services.trainer.takeover import announce, publish, reclaim
from trainer.step.report import StepClock
from trainer.storage.stored import MissingRecords

log = logging.getLogger("tether.trainer")

TAKE_POLL_S = (0.003, 0.05)
"""First and longest wait between two attempts to take a batch, seconds."""
HALT_POLL_S = 1.0
"""Seconds between two reads of the ledger during a halt."""


class TrainLoop:
    """Makes steps until the run is done or the process is to stop."""

    def __init__(
        self,
        run: OpenRun,
        runner: ModelRunner,
        checkpointer: Checkpointer,
        snapshots: Snapshots,
        model: ModelVersion,
    ) -> None:
        """Start from the model's version, which is committed."""
        self._run = run
        self._process = run.process
        self._runner = runner
        self._checkpointer = checkpointer
        self._snapshots = snapshots
        self._model = model
        self._clock = StepClock()
        self._reporter = StepReporter(run.process, runner.device_name)
        self._skips = SkipLimit(run.process.settings.trainer.max_skipped_steps)
        self.audit = LiveAudit(run.process.settings)

    async def answers_loop(self) -> None:
        """Record the engines' answers, until cancelled."""
        while True:
            _, message = await self._run.broadcaster.answers()
            registered = {peer.incarnation for peer in await self._process.ledger.peers(Role.ROLLOUT)}
            self._reporter.note_answer(message, registered)

    async def run(self) -> None:
        """Make steps until the run is done or the process is to stop."""
        status = await self._process.ledger.status()
        self._reporter.start(status)
        self.audit.hold(self._model.published)
        if not status.done:
            await self._runner.wait_for_engine(self._model.published)
        while not status.done and not self._process.stop.is_set():
            with self._clock.part("wait"):
                batch = await self._take()
            if batch is None and self._process.stop.is_set():
                break
            await self._runner.take_device()
            if batch is None:  # the prompts are exhausted: this is the last model
                await self._snapshots.take(self._model.version, self._model.digest, is_last=True)
                # a complete checkpoint is not rewritten, since that would only risk its loss
                if not await self._checkpointer.is_saved(status.version, self._model.digest):
                    await self._checkpointer.checkpoint(status, self._model.digest)
                break
            if not await self._runner.wait_for_engine(self._model.published):
                break
            try:
                committed = await self._step(batch)
            except MissingRecords as missing:
                with self._process.working(f"gives the batch of step {batch.step} back"):
                    self._model = await reclaim(self._run, self._runner, self._model, missing)
                continue
            if committed is None:  # the model has the weights of an uncommitted step
                await self._checkpointer.finish()
                return
            status = committed
        await self._checkpointer.finish()
        if self._checkpointer.is_retry_due and not self._process.stop.is_set():
            await self._checkpointer.checkpoint(status, self._model.digest)
        if self._runner.shared_engine is not None:
            await self._runner.shared_engine.wait_until_copied(self._model.published)
        if status.done:
            log.info("run.done version=%d", status.version)

    async def _take(self) -> TakenBatch | None:
        """Wait for the next batch; return None if the process is to stop or no more groups can arrive."""
        delay, is_ordered = TAKE_POLL_S[0], self._process.settings.is_lockstep
        if is_ordered and self._model.version == 0 and not await wait_for_groups_before(self._process, 1):
            return None
        with self._process.waiting("groups") as set_detail:
            while not self._process.stop.is_set():
                self._checkpointer.check()
                if is_ordered and (await self._process.ledger.status()).draining:
                    return None  # fewer groups than a step needs may remain
                try:
                    return await self._process.ledger.take(self._run.epoch)
                except Refused as refusal:
                    if refusal.reason is Reason.EXHAUSTED:
                        log.info("run.exhausted %s", refusal.detail)
                        await (
                            self._process.ledger.drain()
                        )  # the run is over, with fewer steps than configured
                        return None
                    if refusal.reason not in (Reason.NOT_ENOUGH, Reason.STRAGGLER):
                        raise
                    set_detail(str(refusal))
                await self._publish_if_due()
                await self._runner.leave_device()  # colocated engines must generate first
                if await self._train_drafts():
                    continue
                await self._process.stopped_within(delay)
                delay = min(delay * 1.5, TAKE_POLL_S[1])
        return None

    async def _train_drafts(self) -> bool:
        """Make one update of the draft head; return whether there was data for an update."""
        drafts = self._runner.executor.models.drafts
        if drafts is None or not drafts.left:
            return False
        with self._clock.part("drafts"):
            await self._runner.run(drafts.update)
        return True

    async def _step(self, batch: TakenBatch) -> LedgerStatus | None:
        """Make a step on a batch; return the ledger status after its commit, None if discarded.

        A lockstep run discards the step if groups of its version will not be generated.

        Raises:
            MissingRecords: a group cannot be trained; the weights are unchanged.
        """
        settings = self._process.settings
        version, bound = batch.step + 1, (await self._process.ledger.status()).bound
        if settings.is_lockstep and (cause := find_misplaced_group(batch, settings.bound)):
            await self._halt(cause)
        publishes = self._is_published(version, bound)
        with self._process.working(f"step {batch.step}"):
            step = await self._train(batch, bound, publishes=publishes)
        with self._process.working(f"publishes version {version}"), self._clock.part("publish"):
            manifest = await self._publish(version) if publishes else None
            digest = manifest.digest if manifest else await self._runner.digest()
        with self._clock.part("wait"):
            if settings.is_lockstep and not await wait_for_groups_before(self._process, version):
                return None
        alarms = self.audit.take_alarms()
        peers = await self._process.ledger.peers()
        before = await self._process.ledger.status()
        report = self._reporter.report(
            step,
            epoch=self._run.epoch,
            times=self._clock.lap(),
            status=before,
            peers=peers,
            warnings=(*self._checkpointer.warnings(), *(alarm.sentence() for alarm in alarms)),
        )
        status = await self._commit(step, digest, manifest, report)
        await self._audit_step(step, digest, manifest)
        self._model = ModelVersion(version, digest, manifest or self._model.published)
        await self._announce(manifest, report, status, peers)
        with self._clock.part("checkpoint"):
            await self._snapshots.take(version, digest, is_last=status.done)
            is_due = report.version % settings.trainer.checkpoint_every == 0
            if is_due or status.done or self._checkpointer.is_retry_due:
                with self._process.working(f"saves version {report.version}"):
                    await self._checkpointer.checkpoint(status, digest)
        self._reporter.record(report)
        mismatch = excess_mismatch(report.step, step.stats, settings.trainer)
        if mismatch and settings.trainer.mismatch_action == "stop":
            await self._halt(mismatch)
        if cause := self._skips.cause_after(report.skipped):
            await self._halt(cause)
        await self._act_on_alarms(alarms)
        return status

    async def _audit_step(self, step: TrainedStep, digest: int, manifest: WeightManifest | None) -> None:
        """Submit a committed step to the audit, which then holds the new version."""
        exported = 0
        if manifest is not None and self.audit.wants_digest(step.plan):
            began = time.monotonic()
            with self._clock.part("publish"):
                exported = await self._runner.digest()
            self.audit.note_digest(time.monotonic() - began)
        if step.command is not None:
            digests = self._model.digest, digest
            manifests = self._model.published, manifest
            self.audit.observe(step.command, step.plan, step.stats, digests, exported, manifests)
        if manifest is not None:
            self.audit.hold(manifest)

    async def _act_on_alarms(self, alarms: Sequence[Alarm]) -> None:
        """Execute `audit.action` for alarms, which are reported already."""
        action = self._process.settings.audit.action
        for alarm in alarms:
            engine = alarm.where.get("engine", "")
            if action == "stop":
                await self._halt(alarm.sentence())
            elif action == "quarantine" and engine and alarm.is_engine_fault:
                # the ledger releases its groups and grants it no leases, even if it misses the broadcast
                await self._process.ledger.unregister(engine, refuted=True)
                self._run.broadcaster.publish(
                    Control(action=Action.QUARANTINE, engine=engine), epoch=self._run.epoch
                )

    async def _halt(self, cause: str) -> None:
        """Halt the run; return when leases are granted again or the process is to stop."""
        log.error("run.halted cause=%s", cause)
        ledger, stop = self._process.ledger, self._process.stop
        await ledger.halt(self._run.epoch, cause)
        with self._process.waiting("the halt to end: tether drain D --off"):
            while not stop.is_set() and (await ledger.status()).halted:
                await self._process.stopped_within(HALT_POLL_S)

    async def _train(self, batch: TakenBatch, bound: Bound, *, publishes: bool) -> TrainedStep:
        """Make one optimizer step on a batch; make engines abort the groups that the take dropped."""
        dropped_lengths: list[list[int]] = []
        if batch.dropped:
            dropped_lengths = await asyncio.to_thread(self._run.response_lengths, batch.dropped)
            self._run.broadcaster.publish(
                Control(action=Action.ABORT, groups=batch.dropped), epoch=self._run.epoch
            )
            await self._run.forget(batch.dropped)
        command = await asyncio.to_thread(
            self._run.read_command, batch, mask_late=bound.policy is Policy.MASK
        )
        settings = self._process.settings
        if settings.trainer.is_profiled(batch.step):
            profile = settings.run_dir / "profiles" / f"step_{batch.step:08d}"
            command = msgspec.structs.replace(command, profile=str(profile))
        with self._clock.part("train"):
            try:
                plan, stats = await self._runner.train(
                    command, epoch=self._run.epoch, announce=self._announce_draft if publishes else None
                )
            except ProtocolError as error:  # raised before any rank began the step
                raise await asyncio.to_thread(self._run.find_unreadable, batch, error) from error
        flops = await asyncio.to_thread(self._runner.flops, plan, command.epochs)
        return TrainedStep(batch, plan, stats, flops, dropped_lengths, command)

    def _is_published(self, version: int, bound: Bound) -> bool:
        settings = self._process.settings
        interval, is_last = settings.trainer.publish_every, version >= settings.run.steps
        if is_last and not interval:  # no later step needs the weights
            return False
        return is_published(version, self._model.published.version, interval, bound.max_staleness)

    async def _publish_if_due(self) -> None:
        """Publish the model's version if the bound was lowered and engines get no leases without it.

        Raises:
            TetherError: the export differs from the committed version.
        """
        model = self._model
        if model.version == model.published.version:
            return
        if not self._is_published(model.version, (await self._process.ledger.status()).bound):
            return
        await self._runner.take_device()
        manifest = await self._publish(model.version)
        if manifest.digest != model.digest:
            raise TetherError(f"version {model.version} is not what was committed; the trainer starts again")
        self._model = replace(model, published=manifest)
        await announce(self._run, manifest)

    async def _publish(self, version: int) -> WeightManifest:
        """Publish the weights of a version; return its manifest."""
        provisional = await self._runner.provisional(self._run.epoch, version)
        if provisional is not None:
            self._announce_draft(provisional)
        return await publish(self._run, self._runner, version)

    def _announce_draft(self, draft: WeightDraft) -> None:
        """Let engines receive a version during its publication; they commit it only with its manifest."""
        self._run.broadcaster.publish(draft, epoch=self._run.epoch)

    async def _commit(
        self, step: TrainedStep, digest: int, manifest: WeightManifest | None, report: StepReport
    ) -> LedgerStatus:
        """Commit a step to the ledger, then append it to the journal; return the ledger status.

        Without a manifest the version is not published.

        Raises:
            TetherError: the ledger was replaced by one without this commit.
        """
        run, ledger, payload = self._run, self._process.ledger, encode_payload(report)
        version = await ledger.commit(
            run.epoch,
            step.taken.step,
            step.plan.trained_counts,
            digest=digest,
            report=payload,
            manifest=encode_payload(manifest) if manifest else b"",
        )
        status = await ledger.status()
        if status.version < version:  # the model would be a step ahead, and the step would be trained twice
            raise TetherError(
                f"the ledger lost the commit of step {step.taken.step}: its server was replaced; "
                "the trainer starts again"
            )
        entry = commit_entry(
            run.epoch,
            step.taken,
            step.plan.trained_counts,
            status.sequence,
            digest=digest,
            report=payload,
        )
        # before any engine serves the version: the journal restores a commit that the ledger loses
        await retry_until_written(self._process, partial(run.spool.append, [entry]), run.check_ownership)
        return status

    async def _announce(
        self,
        manifest: WeightManifest | None,
        report: StepReport,
        status: LedgerStatus,
        peers: Sequence[Peer],
    ) -> None:
        """Announce a published version, log its step, and retire versions that no engine serves."""
        if manifest:
            self._run.broadcaster.publish(manifest, epoch=self._run.epoch)
        append = partial(self._run.steps.append, report)
        await retry_until_written(self._process, append, self._run.check_ownership)
        alive = {peer.incarnation for peer in peers}
        served = {version for engine, (_, version) in status.engines.items() if engine in alive}
        self._runner.sender.retire(frozenset({self._model.published.version} | served))

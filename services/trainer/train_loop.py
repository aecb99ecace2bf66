"""The trainer's loop: take B groups, make one optimizer step, publish the weights, commit, tell the engines.

Order matters. The weights of the new version are complete at their transport before the commit names them;
the commit makes the version and stores its manifest in one script; only then are engines told. A crash before
the commit leaves a version that nobody knows of; a crash after it leaves a manifest that engines find in the
ledger.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from protocol.codec import encode_payload
from protocol.errors import Reason, Refused, TetherError
from protocol.ids import new_epoch
from protocol.messages import Action, Control, StepReport, WeightApplied, WeightFailed, WeightManifest
from protocol.staleness import Policy
from protocol.topics import Role
from services.ledger.event_log.archiver import FILE, last_sequence
from services.ledger.interface import LedgerStatus, Peer, StepRecord, Taken
from services.ledger_recovery.journal_entries import commit_entry
from services.observability.busy import BusyShare
from services.observability.steps import StepLog
from services.trainer.leader import LeaderRank
from trainer.backends.base import StepStats
from trainer.backends.rank_commands import IdleCommand, broadcast_command
from trainer.batch import batch_digest
from trainer.data.batch_builder import BuiltBatch
from trainer.storage.spool import MissingRecord

log = logging.getLogger("tether.trainer")
T = TypeVar("T")

TAKE_POLL_S = (0.003, 0.05)
IDLE_S = 60.0
"""The other ranks hear from rank 0 at least so often, so that their wait is bounded."""


class StepTimes(NamedTuple):
    """Seconds of one step, by what they went into."""

    wait_s: float
    train_s: float
    publish_s: float


class TrainLoop:
    """Makes steps until the run is done or the process is to stop."""

    def __init__(self, rank: LeaderRank, steps: StepLog, manifest: WeightManifest) -> None:
        self._rank = rank
        self._process = rank.process
        self._steps = steps
        self._manifest = manifest
        self._pause_ms = 0.0
        self._busy = BusyShare()
        self._dropped = (0, 0)  # groups, tokens at the last step

    async def answers_loop(self) -> None:
        """Note what engines answer, until cancelled."""
        while True:
            _, message = await self._rank.caster.answers()
            if isinstance(message, WeightApplied):
                self._pause_ms = max(self._pause_ms, message.pause_ms)
            elif isinstance(message, WeightFailed):
                self._process.metrics.count("weights.failed")
                log.warning(
                    "weights.failed engine=%s version=%d error=%s",
                    message.engine,
                    message.version,
                    message.error,
                )

    async def run(self) -> None:
        """Step until done or stopped."""
        status = await self._process.ledger.status()
        self._dropped = (status.dropped, status.wasted_tokens)
        if not status.done:
            await self._rank.engine_ready(self._manifest)
        while not status.done and not self._process.stop.is_set():
            began = time.monotonic()
            taken = await self._take()
            if taken is None and (self._process.stop.is_set() or self._is_saved(status.version)):
                break
            waited_s = time.monotonic() - began
            await self._rank.take_device()
            if taken is None:
                await self.checkpoint(status)  # the prompts have run out: this is the last model
                break
            if not await self._rank.engine_ready(self._manifest):
                break
            status = await self._step(taken, waited_s)
        if status.done:
            log.info("run.done version=%d", status.version)

    def _is_saved(self, version: int) -> bool:
        """Whether a checkpoint of exactly these weights is there: writing it again would put it at risk for
        nothing."""
        return any(
            (c.version, c.manifest.digest) == (version, self._manifest.digest)
            for c in self._rank.checkpoints.complete()
        )

    async def _take(self) -> Taken | None:
        """The next batch; None if the process is to stop or no more groups can come."""
        delay, last_idle = TAKE_POLL_S[0], time.monotonic()
        with self._process.waiting("groups") as set_detail:
            while not self._process.stop.is_set():
                try:
                    return await self._process.ledger.take(self._rank.epoch)
                except Refused as refusal:
                    if refusal.reason is Reason.EXHAUSTED:
                        log.info("run.exhausted %s", refusal.detail)
                        await (
                            self._process.ledger.drain()
                        )  # the run is over, although its steps are not all made
                        return None
                    if refusal.reason not in (Reason.NOT_ENOUGH, Reason.STRAGGLER):
                        raise
                    set_detail(str(refusal))
                await self._rank.leave_device()  # whoever shares it has to generate first
                await self._process.stopped_within(delay)
                delay = min(delay * 1.5, TAKE_POLL_S[1])
                if time.monotonic() - last_idle > IDLE_S:
                    last_idle = time.monotonic()
                    await self._rank.on_compute(broadcast_command, IdleCommand())
        return None

    async def _step(self, taken: Taken, waited_s: float) -> LedgerStatus:
        rank, ledger = self._rank, self._process.ledger
        if taken.dropped:
            rank.caster.publish(Control(action=Action.ABORT, groups=taken.dropped), epoch=rank.epoch)
            await self._forget(taken.dropped)
        before = await ledger.status()
        try:
            command = await asyncio.to_thread(
                rank.command_for, taken, mask_late=before.bound.policy is Policy.MASK
            )
        except MissingRecord as missing:
            await self._give_back(missing)
            raise
        train_began = time.monotonic()
        built, stats = await rank.on_compute(rank.train, command)
        publish_began = time.monotonic()
        draft = await rank.on_compute(rank.provisional, taken.step + 1)
        if draft is not None:
            rank.caster.publish(draft, epoch=rank.epoch)
        manifest = await rank.on_compute(rank.publish, taken.step + 1)
        done = time.monotonic()
        times = StepTimes(waited_s, publish_began - train_began, done - publish_began)
        digest = await asyncio.to_thread(batch_digest, built.batch)
        engines = await ledger.peers(Role.ROLLOUT)
        report = self._report(taken, built, stats, times, await ledger.status(), engines, digest)
        version = await ledger.commit(
            rank.epoch,
            taken.step,
            built.trained_counts,
            digest=manifest.digest,
            report=encode_payload(report),
            manifest=encode_payload(manifest),
        )
        status = await ledger.status()
        if (
            status.version < version
        ):  # else its weights would be one step ahead of the ledger, and the step be made twice
            raise TetherError(
                f"the ledger lost the commit of step {taken.step}: its server was replaced; the trainer starts again"
            )
        entry = commit_entry(
            rank.epoch,
            taken,
            built.trained_counts,
            status.sequence,
            digest=manifest.digest,
            report=encode_payload(report),
        )
        await asyncio.to_thread(
            rank.spool.append, [entry]
        )  # before anybody serves the version: a ledger that loses it is told again
        self._manifest = manifest
        rank.caster.publish(manifest, epoch=rank.epoch)
        await asyncio.to_thread(self._steps.append, report)
        alive = {peer.incarnation for peer in engines}
        rank.sender.retire(
            frozenset(
                {version} | {served for engine, (_, served) in status.engines.items() if engine in alive}
            )
        )
        if version % self._process.settings.trainer.checkpoint_every == 0 or status.done:
            await self.checkpoint(status)
        for name, value in (
            ("train", report.train_s),
            ("publish", report.publish_s),
            ("wait", report.wait_s),
        ):
            self._process.metrics.seconds.labels(name).observe(value)
        self._process.metrics.count("steps")
        self._process.metrics.count("tokens.trained", report.trained_tokens)
        self._process.info["version"] = version
        log.info(
            "step.done step=%d reward=%.3f lag=%.2f/%d tokens=%d wait_s=%.2f train_s=%.2f publish_s=%.2f",
            report.step,
            report.reward_mean,
            report.lag_mean,
            report.lag_max,
            report.trained_tokens,
            report.wait_s,
            report.train_s,
            report.publish_s,
        )
        return status

    async def _give_back(self, missing: MissingRecord) -> None:
        """The spool lost a group: hand the batch back under a new epoch, have the group generated again; the
        trainer restarts."""
        log.error("spool.missing group=%d token=%s", missing.group, missing.token)
        await self._process.ledger.claim(new_epoch())
        await self._process.ledger.lost(missing.group, missing.token)

    async def checkpoint(self, status: LedgerStatus) -> None:
        """Make a durable checkpoint; only then may the ledger and the spool forget what it covers."""
        rank = self._rank
        began = time.monotonic()
        await rank.on_compute(rank.save, status.version, self._manifest.digest, status.sequence)
        await rank.on_compute(self._export, status.version)
        kept = rank.checkpoints.complete()[0].manifest  # all that are kept can still be gone back to
        oldest = kept.version
        covered = [record for record in await self._process.ledger.step_records(0) if record.step < oldest]
        try:
            await asyncio.to_thread(self._archive, covered)
        except TetherError as error:  # ledger and spool keep the steps; the next checkpoint tries again
            log.error("archive.failed error=%s", error)
            return
        if not await self._forget(
            [group.group for record in covered for group in record.groups], kept.spool_position
        ):
            return  # the ledger still lists the steps, so the next checkpoint tries again
        await self._process.ledger.checkpointed(oldest)
        self._process.metrics.seconds.labels("checkpoint").observe(time.monotonic() - began)
        log.info("checkpoint.done version=%d seconds=%.2f", status.version, time.monotonic() - began)

    async def _forget(self, groups: Sequence[int], journal_from: int = 0) -> bool:
        def forget() -> None:
            archived = last_sequence(self._process.settings.run_dir / FILE) if journal_from else 0
            self._rank.spool.forget(groups, journal_from, archived)

        try:
            await asyncio.to_thread(forget)
        except (TetherError, OSError) as error:
            log.warning("spool.forget_failed error=%s", error)
            return False
        return True

    def _archive(self, covered: Sequence[StepRecord]) -> None:
        """Move the records of steps to the archive, and their reports to the disk, before spool and ledger
        forget them."""
        self._steps.sync()
        spool, archive = self._rank.spool, self._rank.archive
        for record in covered:
            keys = [(group.group, group.token) for group in record.groups]
            try:
                payloads = spool.get_many(keys)
            except MissingRecord as missing:  # forgotten in an earlier life that ended before the ledger knew
                log.warning("archive.missing step=%d error=%s", record.step, missing)
                continue
            archive.put(
                record.step,
                [(group, token, payload) for (group, token), payload in zip(keys, payloads, strict=True)],
            )
        archive.make_room()

    def _export(self, version: int) -> None:
        """Write the model for people and `tether eval`, and remove exports that are older than the
        checkpoints kept (compute thread)."""
        directory = self._process.settings.run_dir / "exports"
        target = directory / f"step_{version:08}"
        shutil.rmtree(target, ignore_errors=True)
        self._rank.export_hf(target)
        for old in sorted(directory.glob("step_*"))[: -self._process.settings.trainer.keep_checkpoints]:
            for stale in (old, old.with_name(f"adapter_{old.name}")):
                shutil.rmtree(stale, ignore_errors=True)

    def _report(
        self,
        taken: Taken,
        built: BuiltBatch,
        stats: StepStats,
        times: StepTimes,
        status: LedgerStatus,
        engines: Sequence[Peer],
        digest: str,
    ) -> StepReport:
        batch = built.stats
        dropped = status.dropped - self._dropped[0]
        wasted = status.wasted_tokens - self._dropped[1]
        self._dropped = (status.dropped, status.wasted_tokens)
        pause_ms, self._pause_ms = self._pause_ms, 0.0
        return StepReport(
            step=taken.step,
            version=taken.step + 1,
            epoch=self._rank.epoch,
            reward_mean=batch.reward_mean,
            reward_std=batch.reward_std,
            lag_mean=batch.lag_mean,
            lag_max=batch.lag_max,
            lag_histogram=batch.lag_histogram,
            trained_tokens=stats.trained_tokens,
            masked_tokens=batch.masked_tokens,
            wasted_tokens=wasted + batch.masked_tokens,
            groups=len(taken.groups),
            dropped_groups=dropped,
            response_length_mean=batch.response_length_mean,
            loss=stats.loss,
            grad_norm=stats.grad_norm,
            entropy=stats.entropy,
            clip_fraction=stats.clip_fraction,
            ratio_mean=stats.ratio_mean,
            logprob_error_max=stats.logprob_error_max,
            generate_s=batch.generate_s,
            train_s=times.train_s,
            publish_s=times.publish_s,
            wait_s=times.wait_s,
            pause_ms=pause_ms,
            skipped=stats.skipped,
            time=time.time(),
            engine_busy=self._busy.since_last(
                {peer.incarnation: peer.info.get("busy_s", 0.0) for peer in engines}
            ),
            batch_digest=digest,
        )

"""Builds the report of each step, and records it in metrics and log."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.messages import StepReport
from services.ledger.interface import LedgerStatus, Peer, Taken
from services.observability.busy import BusyShare
from services.runtime.process import Process
from trainer.backends.base import StepStats
from trainer.data.batch_builder import BuiltBatch

log = logging.getLogger("tether.trainer")


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One optimizer step that was made and is not committed yet."""

    taken: Taken
    built: BuiltBatch
    stats: StepStats
    wait_s: float
    """Seconds that the trainer waited for the batch."""
    train_s: float
    """Seconds of the optimizer step."""


class StepReporter:
    """Reports steps; holds what some of their numbers are differences to."""

    def __init__(self, process: Process, epoch: str) -> None:
        self._process = process
        self._epoch = epoch
        self._pause_ms = 0.0
        self._busy = BusyShare()
        self._dropped = (0, 0)
        """Groups and tokens that the ledger had dropped at the last report."""

    def start(self, status: LedgerStatus) -> None:
        """Count drops from this status of the ledger on."""
        self._dropped = (status.dropped, status.wasted_tokens)

    def note_pause(self, pause_ms: float) -> None:
        """Note how long an engine stood still for a version; the next report has the longest."""
        self._pause_ms = max(self._pause_ms, pause_ms)

    def report(
        self,
        step: TrainedStep,
        *,
        publish_s: float,
        status: LedgerStatus,
        engines: Sequence[Peer],
        digest: str,
    ) -> StepReport:
        """Return the report of a step. Counts and shares in it are of the time since the last one.

        `publish_s` is the seconds that publishing its weights took, `status` the ledger's before the commit,
        `engines` the registered rollout workers, and `digest` the `batch_digest` of its batch.
        """
        batch, stats = step.built.stats, step.stats
        dropped, wasted = self._drops(status)
        pause_ms, self._pause_ms = self._pause_ms, 0.0
        busy_s = {peer.incarnation: peer.info.get("busy_s", 0.0) for peer in engines}
        return StepReport(
            step=step.taken.step,
            version=step.taken.step + 1,
            epoch=self._epoch,
            reward_mean=batch.reward_mean,
            reward_std=batch.reward_std,
            lag_mean=batch.lag_mean,
            lag_max=batch.lag_max,
            lag_histogram=batch.lag_histogram,
            trained_tokens=stats.trained_tokens,
            masked_tokens=batch.masked_tokens,
            wasted_tokens=wasted + batch.masked_tokens,
            groups=len(step.taken.groups),
            dropped_groups=dropped,
            response_length_mean=batch.response_length_mean,
            loss=stats.loss,
            grad_norm=stats.grad_norm,
            entropy=stats.entropy,
            clip_fraction=stats.clip_fraction,
            ratio_mean=stats.ratio_mean,
            logprob_error_max=stats.logprob_error_max,
            generate_s=batch.generate_s,
            train_s=step.train_s,
            publish_s=publish_s,
            wait_s=step.wait_s,
            pause_ms=pause_ms,
            skipped=stats.skipped,
            time=time.time(),
            engine_busy=self._busy.since_last(busy_s),
            batch_digest=digest,
        )

    def record(self, report: StepReport) -> None:
        """Show a committed step in metrics, registry and log."""
        process = self._process
        for name, value in (
            ("train", report.train_s),
            ("publish", report.publish_s),
            ("wait", report.wait_s),
        ):
            process.metrics.seconds.labels(name).observe(value)
        process.metrics.count("steps")
        process.metrics.count("tokens.trained", report.trained_tokens)
        process.info["version"] = report.version
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

    def _drops(self, status: LedgerStatus) -> tuple[int, int]:
        """Return the groups and tokens that were dropped since the last call."""
        before, self._dropped = self._dropped, (status.dropped, status.wasted_tokens)
        return status.dropped - before[0], status.wasted_tokens - before[1]

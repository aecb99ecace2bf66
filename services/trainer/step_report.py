"""Measures and reports each step, and says why skipped steps halt the run."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from protocol.lifecycle import NO_SIGNAL
from protocol.messages import AnyMessage, StepReport, WeightApplied, WeightFailed
from protocol.topics import Role
from services.ledger.interface import LedgerStatus, Peer, TakenBatch
from services.observability.busy import BusyShare
from services.runtime.process import Process
from trainer.backends.base import StepStats
from trainer.config import TrainerConfig
from trainer.peak_flops import model_flops_utilization
from trainer.step.plan import StepPlan
from trainer.step.report import measured_report
from trainer.step.train_command import TrainCommand

log = logging.getLogger("tether.trainer")

SETTINGS_BY_CAUSE: Mapping[str, str] = {
    "bound": "bound.max_staleness, bound.staleness_policy, rollout.groups_in_flight, algorithm.truncated",
    "gradient": "optimizer.lr, trainer.dtype, algorithm.advantage_eps, the weights of rewards",
}
"""Keyword in the cause -> settings to check."""


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """An optimizer step that is not committed yet."""

    taken: TakenBatch
    plan: StepPlan
    stats: StepStats
    flops: float | None = None
    """FLOPs that the model needs for all epochs of the batch, if the backend counts them."""
    dropped_lengths: Sequence[Sequence[int]] = ()
    """Tokens of each sample, for each dropped group whose record the spool held."""
    command: TrainCommand | None = None
    """Command of the step; None excludes the step from the audit."""


class StepReporter:
    """Reports steps; keeps the previous counters, from which reports compute differences."""

    def __init__(self, process: Process, device: str = "") -> None:
        """Store the arguments; `device` is the GPU name of each rank, empty on a CPU."""
        self._process = process
        self._pause_ms: float | None = None
        self._busy = {role: BusyShare() for role in (Role.ROLLOUT, Role.REWARD)}
        self._before: LedgerStatus | None = None
        """Ledger status at the last report."""
        self._devices = [device] * process.settings.parallel.world_size

    def start(self, status: LedgerStatus) -> None:
        """Use this ledger status as the baseline of drop counts."""
        self._before = status

    def note_answer(self, message: AnyMessage, registered: Collection[str]) -> None:
        """Record an engine's answer about a version; the next report contains the longest pause.

        An answer of an unregistered engine is only counted.
        """
        if getattr(message, "engine", "") not in registered:
            self._process.metrics.count("weights.unknown_engine")
        elif isinstance(message, WeightApplied):
            self._pause_ms = max(self._pause_ms or 0.0, message.pause_ms)
        elif isinstance(message, WeightFailed):
            self._process.metrics.count("weights.failed")
            log.warning(
                "weights.failed engine=%s version=%d error=%s",
                message.engine,
                message.version,
                message.error,
            )

    def report(
        self,
        step: TrainedStep,
        *,
        epoch: str,
        times: Mapping[str, float],
        status: LedgerStatus,
        peers: Sequence[Peer],
        warnings: tuple[str, ...] = (),
    ) -> StepReport:
        """Return the report of a step. Counts and shares cover the time since the last report.

        `epoch` is the trainer's epoch. `times` covers the time since the last report. `status` is the ledger
        status before the commit, `peers` are the registered processes. `warnings` are added to the warnings
        of the step.
        """
        pause_ms, self._pause_ms = self._pause_ms, None
        before, self._before = self._before or status, status
        busy = {
            role: share.since_last({peer.incarnation: peer.info for peer in peers if peer.role == role})
            for role, share in self._busy.items()
        }
        lengths = [tokens for group in step.dropped_lengths for tokens in group]
        mismatch = excess_mismatch(step.taken.step, step.stats, self._process.settings.trainer)
        warnings = step.stats.warnings + ((mismatch,) if mismatch else ()) + warnings
        return msgspec.structs.replace(
            measured_report(step.plan, step.stats, epoch=epoch, groups=len(step.taken.groups), times=times),
            wasted_tokens=status.wasted_tokens - before.wasted_tokens + step.plan.stats.masked_tokens,
            dropped_groups=status.dropped - before.dropped,
            dropped_by_reason=_increase(before.dropped_by_reason, status.dropped_by_reason),
            dropped_length_mean=sum(lengths) / len(lengths) if lengths else None,
            dropped_length_groups=len(step.dropped_lengths),
            mfu=model_flops_utilization(step.flops, times["train_s"], self._devices),
            pause_ms=pause_ms,
            engine_busy=busy[Role.ROLLOUT],
            reward_busy=busy[Role.REWARD],
            **self._filtered(status, before, len(step.taken.groups)),
            warnings=warnings,
        )

    def _filtered(self, status: LedgerStatus, before: LedgerStatus, groups_taken: int) -> dict[str, Any]:
        """Return count, tokens and share of the groups filtered since the last report."""
        if not self._process.settings.algorithm.filter_groups:
            return {}
        groups = _increase(before.dropped_by_reason, status.dropped_by_reason).get(NO_SIGNAL, 0)
        tokens = _increase(before.wasted_by_reason, status.wasted_by_reason).get(NO_SIGNAL, 0)
        share = groups / max(1, groups + groups_taken)
        return {"filtered_groups": groups, "filtered_tokens": tokens, "filtered_share": share}

    def record(self, report: StepReport) -> None:
        """Write a committed step to metrics, registry and log."""
        process = self._process
        for name, value in (
            ("train", report.train_s),
            ("publish", report.publish_s),
            ("wait", report.wait_s),
            ("step", report.step_s or 0.0),
        ):
            process.metrics.seconds.labels(name).observe(value)
        process.metrics.count("steps")
        if report.skipped:
            process.metrics.count("steps.skipped")
            log.warning("step.skipped step=%d groups=%d cause=%s", report.step, report.groups, report.skipped)
        process.metrics.count("tokens.trained", report.trained_tokens)
        process.info["version"] = report.version
        log.info(
            "step.done step=%d reward=%.3f lag=%s/%s tokens=%d wait_s=%.2f train_s=%.2f publish_s=%.2f",
            report.step,
            report.reward_mean,
            _format_number(report.lag_mean, 2),
            _format_number(report.lag_max, 0),
            report.trained_tokens,
            report.wait_s,
            report.train_s,
            report.publish_s,
        )
        for warning in report.warnings:
            process.metrics.count("step.warnings")
            log.warning("step.warning text=%s", warning)


def excess_mismatch(step: int, stats: StepStats, config: TrainerConfig) -> str:
    """Return a sentence about a step's mismatch at lag 0 if it exceeds the limit; else an empty string.

    Steps without tokens at lag 0 are not judged, because the policy may have moved.
    """
    error, limit = stats.token_mult_prob_error, config.mismatch_limit
    if error is None or not limit or error <= limit:
        return ""
    return (
        f"step {step}: engine and trainer disagree on tokens of the same weights, "
        f"token_mult_prob_error {error:.4g} is over trainer.mismatch_limit {limit:g}; "
        "compare their dtypes, sampling settings and model code (docs/metrics.md)"
    )


def _increase(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """Return the increase of each count."""
    return {name: count - before.get(name, 0) for name, count in now.items()}


def _format_number(value: float | None, digits: int) -> str:
    """Format a number for the log; a dash if it was not measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def halt_cause(skipped_steps: int, cause: str) -> str:
    """Return a sentence that says why the run halts after skipped steps, the last of them for `cause`."""
    every = ", ".join(SETTINGS_BY_CAUSE.values())
    settings = next((names for word, names in SETTINGS_BY_CAUSE.items() if word in cause), every)
    return (
        f"{skipped_steps} steps in a row were skipped and changed no weight (trainer.max_skipped_steps), the "
        f"last one because {cause}: check {settings}"
    )


class SkipLimit:
    """Counter of consecutive skipped steps; a trained step or a halt resets the counter."""

    def __init__(self, limit: int) -> None:
        """Start at 0; `limit` is `trainer.max_skipped_steps`."""
        self._limit = limit
        self._skipped_in_row = 0

    def cause_after(self, skipped: str) -> str:
        """Count a committed step. `skipped` is the cause of a skipped step, or empty.

        Returns:
            The cause for which the run must halt; empty if it continues.
        """
        self._skipped_in_row = self._skipped_in_row + 1 if skipped else 0
        if self._skipped_in_row < self._limit:
            return ""
        skipped_in_row, self._skipped_in_row = self._skipped_in_row, 0
        return halt_cause(skipped_in_row, skipped)

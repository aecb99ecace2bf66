"""Audits a current run in a thread of the trainer, and writes alarms to RUN_DIR/alarms.jsonl.

If models are loaded, one published version is held at a time: from its publication until every group that it
may have sampled is trained. Then the next published version is held. So tokens of all lags are recomputed,
for some versions.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import TetherError, WeightError
from protocol.messages import Rollout, WeightManifest
from rollout.engines.base import KvPolicy
from rollout.prompts.registry import make_source
from rollout.render import Renderer
from services.audit.alarms import Alarm
from services.audit.auditor import (
    AuditedStep,
    Auditor,
    Tensors,
    UnchangedSteps,
    is_audited,
    wrong_versions,
)
from services.audit.budget import Budget, compute_alone
from services.audit.recompute import RecomputeResources, recompute_resources, recomputers
from services.audit.records import Expectations
from services.audit.second_worker import Rewards, second_worker
from services.audit.versions import model_digest, read_version
from services.run_record.evaluations import read_evaluations
from services.runtime.user_modules import add_user_modules
from services.settings.sections import Settings
from services.settings.sources import CLOUDS
from trainer.backends.base import StepStats
from trainer.functional.learning_rate import learning_rate
from trainer.step.plan import StepPlan
from trainer.step.train_command import TrainCommand
from trainer.weights.registry import TRANSPORTS

log = logging.getLogger("tether.audit")

FILE = "alarms.jsonl"
"""Name of the file in the run directory, one line per alarm."""
MAX_QUEUED = 2
"""Maximum number of queued versions and steps."""
MAX_ROW_OPERATIONS = 1e12
"""Maximum floating-point operations per row, ten seconds of a processor: the run's end waits for a row."""
MIN_START_S = 0.5
"""Processor time that must be available before an audit starts, seconds."""
DIGEST_BUDGET_FACTOR = 4.0
"""A digest of the trainer's weights is computed once the budget covers this many times its cost."""
MAX_KEPT_DIGESTS = 1024
"""Number of versions whose digests are kept for later evaluations."""
SINGLE_TURN_ENVIRONMENTS = ("single_turn",)
"""Environments whose samples end exactly as the engine ended them."""
FULLY_TRAINED_ENVIRONMENTS = (
    *SINGLE_TURN_ENVIRONMENTS,
    "gsm8k",
    "guess_number",
    "tools",
    "textarena",
    "openenv",
)
"""Environments in which all turns are trained."""


def build_expectations(settings: Settings, rewards: Rewards) -> Expectations:
    """Return the parties that recompute records, where the settings imply a unique result.

    Args:
        settings: settings of the run.
        rewards: second call of the verifiers.

    Raises:
        SettingsError: tokenizer or prompts cannot be read.
    """
    name, renderer = settings.environment.name, Renderer(settings.model_dir, settings.rendering)
    plain_end = name in SINGLE_TURN_ENVIRONMENTS and not settings.render.stop
    plain_turns = name in FULLY_TRAINED_ENVIRONMENTS
    source = make_source(settings.prompts) if plain_turns else None
    return Expectations(
        prompt=(lambda group: renderer.prompt_tokens(source.at(group))) if source else None,
        rewards=rewards if plain_turns else None,
        text=renderer.text if plain_end else None,
        stop_token_ids=frozenset(renderer.stop_token_ids) if plain_end else frozenset(),
        whole_turns=plain_turns and settings.environment.sampling != "context",
        are_draws=not (settings.sampling.keep_first or settings.algorithm.filter_groups),
        algorithm=settings.algorithm,
    )


def is_learning(settings: Settings, step: int) -> bool:
    """Return whether a step's learning rate is above 0 and its loss trains the policy."""
    updates = step * settings.trainer.epochs_per_batch * settings.trainer.num_mini_batches
    warm = settings.needs_critic and step < settings.critic.critic_warmup_steps
    return not warm and learning_rate(settings.optimizer, updates) > 0


class LiveAudit:
    """Audit of a running trainer. `hold`, `observe` and `take_alarms` do not block."""

    def __init__(self, settings: Settings, budget: Budget | None = None) -> None:
        """Start without a version; the default budget is the share of the groups."""
        self._settings = settings
        self.budget = budget or Budget(settings.audit.share)
        self._share = settings.audit.share
        self._path = settings.run_dir / FILE
        self._work: asyncio.Queue[AuditedStep | WeightManifest] = asyncio.Queue(MAX_QUEUED)
        """Input of `audit_loop`; while the queue is full, further steps and versions are skipped."""
        self._unchanged = UnchangedSteps(settings.engine.dtype)
        self._reads_versions = settings.engine.kv is not KvPolicy.KEEP
        """Whether versions are read; false without models that could use them."""
        self._last_queued: tuple[str, int] | None = None
        """Epoch and version queued last, which is held once it is read."""
        self._held_versions: dict[int, Tensors] = {}
        self._auditor: Auditor | None = None
        self._digest_s = 0.0
        """Seconds of the last digest of the trainer's weights."""
        self._read_s = 0.0
        """Processor time of reading the last version, seconds."""
        self._rewards: Rewards | None = None
        """Second call of the verifiers; None before the first audited step."""
        self._epoch = ""
        """Epoch of the trainer at the last published version."""
        self._digests: dict[int, int] = {}
        """Version -> digest of its weights, for the newest versions."""
        self._ended = threading.Event()
        """Set when the audit ends."""
        self._alarms: list[Alarm] = []

    def hold(self, manifest: WeightManifest) -> None:
        """Hold a published version, unless the groups of a held version may still be trained."""
        self._epoch = manifest.epoch
        readable = manifest.transport in TRANSPORTS.having("files") and "://" not in manifest.location
        if not (self._is_enabled and self._reads_versions and self._has_time and readable):
            return
        if self._last_queued is not None and self._last_queued[0] == manifest.epoch:
            last = self._last_queued[1] + self._settings.bound.max_staleness
        else:
            last = -1
        if manifest.version > last and not self._work.full():
            self._last_queued = manifest.epoch, manifest.version
            self._work.put_nowait(manifest)

    def is_due(self, plan: StepPlan) -> bool:
        """Return whether a step will be audited: a group of the step is audited, and the budget suffices."""
        free = self._is_enabled and self._has_time and not self._work.full()
        return free and any(is_audited(group, self._share) for group in plan.trained_counts)

    def wants_digest(self, plan: StepPlan) -> bool:
        """Return whether to compute a digest of the trainer's weights, by the last digest's cost."""
        return self.is_due(plan) and self.budget.covers(DIGEST_BUDGET_FACTOR * self._digest_s)

    def note_digest(self, seconds: float) -> None:
        """Record the duration of the trainer's digest."""
        self._digest_s = seconds
        self.budget.charge(seconds)

    def observe(
        self,
        command: TrainCommand,
        plan: StepPlan,
        stats: StepStats,
        digests: tuple[int, int],
        exported: int = 0,
        manifests: tuple[WeightManifest | None, WeightManifest | None] = (None, None),
    ) -> None:
        """Queue a committed step, unless it has no audited group or the queue is full.

        Args:
            command: command of the step, with the stored records.
            plan, stats: plan and measurements of the step.
            digests: digests of the versions before and after the step.
            exported: as in `AuditedStep`.
            manifests: manifests of the last version published before the step and of its own; None without
                one.
        """
        if not self._is_enabled:
            return
        self._digests[plan.step + 1] = digests[1]
        self._digests.pop(plan.step + 1 - MAX_KEPT_DIGESTS, None)
        compared = digests
        if self._settings.engine.trained_head:  # the head changes although the model does not
            compared = model_digest(manifests[0], plan.step), model_digest(manifests[1], plan.step + 1)
        unchanged = self._unchanged.count_step(stats, compared, learns=is_learning(self._settings, plan.step))
        if self.is_due(plan) or (self._unchanged.is_fault and not self._work.full()):
            self._work.put_nowait(AuditedStep(command, plan, stats, digests, unchanged, exported))

    def take_alarms(self) -> tuple[Alarm, ...]:
        """Return the alarms since the last call."""
        alarms, self._alarms = tuple(self._alarms), []
        return alarms

    async def audit_loop(self) -> None:
        """Audit the queued steps, until cancelled or an audit fails. A failure never ends the run."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="audit", initializer=compute_alone)
        loop = asyncio.get_running_loop()
        try:
            async with contextlib.AsyncExitStack() as stack:
                while True:
                    work = await self._work.get()
                    if isinstance(work, AuditedStep) and self._rewards is None:
                        began = time.monotonic()
                        try:
                            self._rewards = await stack.enter_async_context(self._second_worker())
                        except TetherError as error:
                            log.warning("audit.no_second_worker error=%s", error)
                            self._rewards = lambda rollout: None
                        finally:
                            self.budget.charge(time.monotonic() - began)
                    alarms = await loop.run_in_executor(thread, self._carry_out, work)
                    for alarm in alarms:
                        log.error("audit.alarm %s", alarm.sentence())
                    self._alarms += alarms
        except Exception:
            log.exception("audit.failed: the run continues without an audit")
        finally:
            self._ended.set()  # a working thread ends after its row
            thread.shutdown(wait=False)
            self._held_versions = {}
            if self._auditor is not None and self._auditor.rows_left_out:
                log.warning("audit.rows_left_out rows=%d", self._auditor.rows_left_out)
            self._auditor = None

    def _second_worker(self) -> contextlib.AbstractAsyncContextManager[Rewards]:
        config = dataclasses.replace(self._settings.reward, workers=1)
        withheld = [name for name in os.environ if name.startswith(CLOUDS)]
        return second_worker(config, add_user_modules(self._settings), withheld)

    def _rescore(self, rollout: Rollout) -> Sequence[float | None] | None:
        began = time.monotonic()
        try:
            return self._rewards(rollout) if self._rewards is not None else None
        finally:
            self.budget.charge(time.monotonic() - began)  # wall clock: workers' processor time is unknown

    @property
    def _is_enabled(self) -> bool:
        return bool(self._share) and not self._ended.is_set()

    @cached_property
    def _resources(self) -> RecomputeResources | None:
        return recompute_resources(self._settings, MAX_ROW_OPERATIONS)

    @property
    def _has_time(self) -> bool:
        return self.budget.covers(0.0 if self._rewards is not None else MIN_START_S)

    def _is_stopped(self) -> bool:
        self.budget.note_thread()
        return self._ended.is_set() or not self.budget.covers()

    def _carry_out(self, work: AuditedStep | WeightManifest) -> list[Alarm]:
        try:
            if isinstance(work, AuditedStep):
                return self._audit(work)
            self._read(work)
            return []
        finally:
            self.budget.note_thread()

    def _audit(self, work: AuditedStep) -> list[Alarm]:
        auditor = self._auditor = self._auditor or self._make_auditor()
        if self._held_versions and not auditor.recomputes:
            auditor.set_models(recomputers(self._settings, MAX_ROW_OPERATIONS))
            self._reads_versions = auditor.recomputes
        alarms = auditor.audit(work, self._held_versions)
        lines = [one for one in read_evaluations(self._settings.run_dir) if one.epoch == self._epoch]
        alarms += auditor.filter_new(wrong_versions(lines, dict(self._digests)))
        append_alarms(self._path, alarms)
        return alarms

    def _make_auditor(self) -> Auditor:
        """Return an auditor without models."""
        expectations = build_expectations(self._settings, self._rescore)
        return Auditor(
            None,
            share=self._share,
            dtype=self._settings.engine.dtype,
            expectations=expectations,
            stopped=self._is_stopped,
        )

    def _read(self, manifest: WeightManifest) -> None:
        """Hold a version in place of the previous one, if memory and time allow models that use it."""
        self._reads_versions = self._reads_versions and self._resources is not None
        if not self._reads_versions or self._resources is None or self._ended.is_set():
            return
        is_loaded = self._auditor is not None and self._auditor.recomputes
        row_s = self._auditor.row_s if self._auditor is not None else 0.0
        # if reading a version used all time, none of its rows would be recomputed before its groups are
        # trained
        if not self.budget.covers((0.0 if is_loaded else self._resources.load_s) + self._read_s + row_s):
            self._last_queued = None  # a later version is held instead
            return
        self._held_versions = {}  # frees memory for the next version
        began = time.thread_time()
        try:
            self._held_versions = {manifest.version: read_version(manifest, self._settings.weights.timeout_s)}
        except (WeightError, OSError) as error:  # the version was retired: the next one is held instead
            log.info("audit.version_missed version=%d error=%r", manifest.version, error)
            self._last_queued = None
            return
        self._read_s = time.thread_time() - began


def append_alarms(path: Path, alarms: Sequence[Alarm]) -> None:
    """Append alarms to a file, one JSON object per line. Raises OSError."""
    if alarms:
        with path.open("ab") as file:
            file.writelines(msgspec.json.encode(alarm_line(alarm)) + b"\n" for alarm in alarms)


def alarm_line(alarm: Alarm) -> dict[str, Any]:
    """Return an alarm as a line of alarms.jsonl."""
    fields = {**dataclasses.asdict(alarm), "where": dict(alarm.where)}
    return {**fields, "reproduction": alarm.reproduction, "sentence": alarm.sentence()}

"""Leases prompt groups, generates and sends them, and holds each until it is acknowledged or released.

Each group runs in its own task; at most `groups_in_flight` tasks run at a time. A running task extends its
lease. When the ledger reports the lease as lost, the task is cancelled and its result discarded.
"""

import asyncio
import contextlib
import functools
import logging
import time
from dataclasses import dataclass

from protocol.errors import EngineError, EpisodeError, FrameTooLarge, Reason, Refused, SettingsError
from protocol.ids import new_token
from protocol.messages import Rollout
from rollout.abandoned_tasks import AbandonedTasks
from rollout.engines.base import Engine, Sampling
from rollout.environments.base import Environment
from rollout.episodes import EpisodeReport
from rollout.generate import ENGINE, failure_reason, generate_group
from rollout.prompts.base import PromptSource
from rollout.render import Renderer
from rollout.seeds import seed_within
from rollout.sessions.model_calls import CANCELLED
from rollout.sessions.record import Recording
from services.bus.sender import Declined, Sender
from services.ledger.interface import Lease
from services.ledger.limits import MAX_DETAIL
from services.observability.busy import BusyMeter
from services.observability.metrics import Metrics
from services.rollout.call_sender import make_recording
from services.runtime.event_loop import is_set_within
from services.runtime.process import Process

log = logging.getLogger("tether.leasing")

POLL_S = (0.02, 2.0)
"""Shortest and longest wait between two attempts to lease, seconds.

A new version usually opens room under the bound and wakes the workers at once. Thousands of workers that poll
four times a second would dominate the ledger's load.
"""
STOP_POLL_S = 0.25
"""Seconds between two checks of the stop event while no group can be leased."""
MIN_SAMPLES = 2
"""Minimum number of samples in a group after failures: a single sample cannot be compared."""


DROPPED = "its group was dropped: it would have exceeded the staleness bound"
"""Reason given to the episodes of a group that the trainer dropped."""
STOPPING = "the worker stops, and releases its group"
RESTARTED = "the lease of its group ran out, and the group was restarted"


class LeaseLost(Exception):
    """Raised in the task of a group that was dropped, or whose lease another worker took over."""


class PrefixUse:
    """Prompt tokens since the worker started, counted by source.

    The first call of an episode can share the prompt of its group; later calls share the tokens of their
    session.
    """

    def __init__(self) -> None:
        self._tokens: dict[tuple[str, str], int] = {}

    def add(self, report: EpisodeReport) -> None:
        """Count the calls of an episode that ended or failed."""
        for call, prompts in (("first", report.first_prompt), ("later", report.later_prompts)):
            for source, tokens in (("cache", prompts.cached), ("computed", prompts.total - prompts.cached)):
                self._tokens[call, source] = self._tokens.get((call, source), 0) + tokens

    def tokens(self) -> dict[tuple[str, str], int]:
        """Return token counts by call (`first`, `later`) and source (`cache`, `computed`)."""
        return self._tokens

    @property
    def hit_rate(self) -> float | None:
        """Share of all prompt tokens that came from the cache; None before the first call."""
        cached = sum(tokens for (_, source), tokens in self._tokens.items() if source == "cache")
        total = sum(self._tokens.values())
        return round(cached / total, 4) if total else None


@dataclass(slots=True)
class HeldGroup:
    """A group whose lease the worker holds."""

    lease: Lease
    task: asyncio.Task[None] | None = None
    """Task that generates and sends the group; None until it is created."""
    cancel_reason: str = ""
    """Why the task was cancelled, also the answer to the group's sessions; empty while it runs."""
    release_reason: str = "drain"
    """Reason with which the lease is released if the task is cancelled."""

    def cancel(self, reason: str) -> None:
        """Cancel the task. Only the reason of the first call is kept."""
        self.cancel_reason = self.cancel_reason or reason
        if self.task is not None:
            self.task.cancel()


class GroupRunner:
    """Leases groups while `run` runs, and processes each in its own task."""

    def __init__(
        self,
        process: Process,
        engine: Engine,
        renderer: Renderer,
        environment: Environment,
        prompts: PromptSource,
        sender: Sender,
        calls: Sender | None = None,
    ) -> None:
        """Start without a group. `calls` records the calls of sessions; None disables recording."""
        self._process, self._engine, self._renderer = process, engine, renderer
        self._environment, self._prompts, self._sender = environment, prompts, sender
        self._calls = calls
        self._config = process.settings.rollout
        # Sessions are balanced between workers only if all engines are alike.
        pool = process.settings.services.pool
        self._balances_sessions = environment.has_calls and len(pool) < 2
        self._slots = asyncio.Semaphore(self._config.groups_in_flight)
        self._held: dict[int, HeldGroup] = {}
        self._nudged = asyncio.Event()
        self._prefixes = PrefixUse()
        self._abandoned_tasks = AbandonedTasks()
        process.metrics.watch(
            "tether_stray_episodes",
            "Episodes still running after cancellation, and how many of them have ended",
            self._abandoned_tasks.counts,
        )
        process.metrics.watch_labelled(
            "tether_prefix_tokens",
            "Tokens of model calls' prompts, by call of an episode and where their KV came from",
            ("call", "source"),
            self._prefixes.tokens,
        )
        self.meter = BusyMeter()
        """Measures the time in which the engine is awake and has groups to generate."""
        process.on_heartbeat.append(
            lambda: process.info.update(
                self.meter.reading(), groups=len(self._held), prefix_hits=self._prefixes.hit_rate
            )
        )

    async def run(self) -> None:
        """Lease until the process is to stop, then drain: finish within `drain_s`, release the rest.

        Raises:
            Refused: HALTED, the run is halted; REFUTED, an audit refutes the engine.
            TetherError: too many episodes do not end after their cancellation.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._nudge_at_stop(), name="lease.stop")
            await self._lease_loop(tasks)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.drain_s):
                    # the groups of a sleeping engine are released at once
                    while self._held and self._is_serving():
                        running = [job.task for job in self._held.values() if job.task]
                        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for job in self._held.values():
                job.cancel(STOPPING)

    def nudge(self) -> None:
        """Try to lease at once, because there may be room under the bound."""
        self._nudged.set()

    async def _nudge_at_stop(self) -> None:
        await self._process.stop.wait()
        self.nudge()

    def abort(self, groups: tuple[int, ...]) -> None:
        """Cancel the groups that the trainer dropped.

        The ledger has ended their leases, so it refuses the release that their tasks attempt.
        """
        self.nudge()
        for group in groups:
            if group in self._held:
                self._process.metrics.count("group.aborted")
                self._held[group].cancel(DROPPED)

    async def _lease_loop(self, tasks: asyncio.TaskGroup) -> None:
        while not self._process.stop.is_set():
            try:
                async with asyncio.timeout(STOP_POLL_S):
                    await self._slots.acquire()
            except TimeoutError:
                continue
            lease = await self._next_lease()
            if lease is None:
                self._slots.release()
                return
            if lease.group in self._held:  # its expired lease, granted again: the old attempt is void
                self._held[lease.group].cancel(RESTARTED)
            self._held[lease.group] = job = HeldGroup(lease)
            job.task = tasks.create_task(self._run_group(job), name=f"group-{lease.group}")
            job.task.add_done_callback(functools.partial(self._on_task_done, job))

    def _on_task_done(self, job: HeldGroup, task: asyncio.Task[None]) -> None:
        if self._held.get(job.lease.group) is job:
            del self._held[job.lease.group]
        self._slots.release()
        self._process.metrics.busy.set(len(self._held))

    async def _next_lease(self) -> Lease | None:
        """Wait for room under the bound and return a lease; return None if the process is to stop."""
        self._abandoned_tasks.check()
        delay, request = POLL_S[0], new_token()
        began = time.monotonic()
        with self._process.waiting("a lease") as set_detail:
            while not self._process.stop.is_set():
                if not self._is_serving():
                    set_detail("the engine serves no version")
                    await self._nudged_within(STOP_POLL_S)
                    continue
                try:
                    lease = await self._process.ledger.lease(
                        request=request,
                        engine=self._process.incarnation,
                        holder=self._process.incarnation,
                        lease_ms=int(self._config.lease_s * 1000),
                        groups=len(self._held) if self._balances_sessions else -1,
                    )
                except Refused as refusal:
                    if refusal.reason in (Reason.HALTED, Reason.REFUTED):
                        raise
                    self._process.metrics.count(f"lease.refused.{refusal.reason}")
                    set_detail(refusal.reason)
                    delay = POLL_S[0] if await self._nudged_within(delay) else min(delay * 2, POLL_S[1])
                else:
                    self._process.metrics.seconds.labels("lease_wait").observe(time.monotonic() - began)
                    return lease
        return None

    def _is_serving(self) -> bool:
        """Return whether the engine serves a version; false at the start and while the engine sleeps.

        During sleep, leases are still extended. Their requests continue after wake-up.
        """
        return self._engine.served.version >= 0

    async def _nudged_within(self, seconds: float) -> bool:
        is_nudged = await is_set_within(self._nudged, seconds)
        self._nudged.clear()
        return is_nudged

    async def _run_group(self, job: HeldGroup) -> None:
        try:
            await self._generate_under_lease(job)
        except asyncio.CancelledError:
            await self._release_lease(job.lease, job.release_reason)
            raise

    async def _generate_under_lease(self, job: HeldGroup) -> None:
        lease = job.lease
        try:
            async with asyncio.TaskGroup() as tasks:
                extending = tasks.create_task(self._extend_loop(job), name=f"extend-{lease.group}")
                await self._generate_and_send(job)
                extending.cancel()
        except* LeaseLost:
            self._process.metrics.count("lease.lost")
            log.info("lease.lost group=%d token=%s", lease.group, lease.token)

    async def _generate_and_send(self, job: HeldGroup) -> None:
        lease, settings, metrics = job.lease, self._process.settings.sampling, self._process.metrics
        n = settings.samples_per_prompt
        try:
            with self.meter.working():
                prompt = self._prompts.at(lease.group)
                rollout = await generate_group(
                    self._engine,
                    self._renderer,
                    self._environment,
                    prompt,
                    group=lease.group,
                    token=lease.token,
                    n=n,
                    engine_name=self._process.incarnation,
                    sampling=Sampling(
                        max_tokens=settings.max_tokens,
                        temperature=settings.temperature,
                        top_p=settings.top_p,
                        top_k=settings.top_k,
                        stop_token_ids=self._renderer.stop_token_ids,
                        seed=seed_within(self._process.settings.sampling_seed, lease.group),
                    ),
                    config=self._process.settings.environment,
                    max_model_len=self._process.settings.engine.max_model_len,
                    min_samples=min(n, MIN_SAMPLES),
                    keep=settings.keep_first,
                    report=functools.partial(self._observe, lease.group),
                    group_end_reason=lambda: job.cancel_reason,
                    recording=self._recording(job),
                    abandoned_tasks=self._abandoned_tasks,
                    with_turn_texts=self._process.settings.reward.may_score_turns,
                )
        except (SettingsError, EngineError, EpisodeError) as error:
            await self._engine.check()  # a dead engine ends the process; a bad prompt ends only the group
            await self._fail(lease, error)
            return
        metrics.seconds.labels("generate").observe(rollout.generate_s)
        metrics.count("tokens.generated", int(rollout.loss_mask.numpy().sum()))
        if len(rollout.responses) < (settings.keep_first or n):
            metrics.count("group.smaller")
            log.info("group.smaller group=%d samples=%d of=%d", lease.group, len(rollout.responses), n)
        await self._send(lease, rollout)

    async def _send(self, lease: Lease, rollout: Rollout) -> None:
        """Send a group; return when the group is acknowledged, declined or found too large."""
        try:
            with self._process.waiting(f"acknowledgement of group {lease.group}"):
                await self._sender.send(rollout, epoch=lease.epoch, group=lease.group, token=lease.token)
        except FrameTooLarge as error:
            await self._fail(lease, error)
        except Declined as refusal:
            self._process.metrics.count("group.declined")
            log.info("group.declined group=%d why=%s", lease.group, refusal)
        else:
            self._process.metrics.count("group.delivered")

    def _recording(self, job: HeldGroup) -> Recording | None:
        """Return the recorder of a group's calls, which cancels the group when its lease is lost.

        Without the cancellation the refusals would fail the harnesses, and the group would be dropped.
        """

        def cancel_group(why: str) -> None:
            if not job.cancel_reason:
                self._process.metrics.count("lease.lost")
                log.info("lease.lost group=%d token=%s why=%s", job.lease.group, job.lease.token, why)
                job.release_reason = "lease"
                job.cancel(f"the lease of its group is lost ({why})")

        calls, engine = self._calls, self._process.incarnation
        return make_recording(calls, job.lease, engine, cancel_group) if calls else None

    def _observe(self, group: int, report: EpisodeReport) -> None:
        self._prefixes.add(report)
        observe_episode(self._process.metrics, group, report)

    async def _extend_loop(self, job: HeldGroup) -> None:
        """Extend a lease until cancelled. Raises LeaseLost if the ledger refuses."""
        lease, lease_ms = job.lease, int(self._config.lease_s * 1000)
        while True:
            await asyncio.sleep(self._config.lease_s / 3)
            try:
                await self._process.ledger.extend(lease.group, lease.token, lease_ms)
            except Refused as refusal:
                job.cancel_reason = job.cancel_reason or f"the lease of its group is lost ({refusal})"
                raise LeaseLost from refusal

    async def _fail(self, lease: Lease, error: Exception) -> None:
        """Release a group that cannot be generated or sent, or drop it after `prompt_failures` attempts.

        After an engine failure the group is only released, since another attempt may succeed.
        """
        reason = failure_reason(error)
        log.warning("group.failed group=%d attempt=%d error=%s", lease.group, lease.attempt, error)
        self._process.metrics.count("group.failed")
        detail = f"{reason}: {error}"[:MAX_DETAIL].encode(errors="replace").decode()  # removes surrogates
        with contextlib.suppress(Refused):
            if reason != ENGINE and lease.attempt >= self._config.prompt_failures:
                await self._process.ledger.drop(lease.group, lease.token, reason, detail=detail)
            else:
                await self._process.ledger.release(lease.group, lease.token, detail)

    async def _release_lease(self, lease: Lease, reason: str) -> None:
        with contextlib.suppress(Refused, TimeoutError):
            async with asyncio.timeout(2):
                await self._process.ledger.release(lease.group, lease.token, reason)


def observe_episode(metrics: Metrics, group: int, report: EpisodeReport) -> None:
    """Count one attempt at a sample: turns, seconds, tokens, and the reason of a failure."""
    metrics.count("episode.turns", report.turns)
    metrics.seconds.labels("episode").observe(report.seconds)
    metrics.count("session.replayed", report.replayed)
    metrics.count("session.diverged", report.diverged)
    if not report.failure:
        metrics.count("episode.done")
        return
    if report.failure == CANCELLED:
        metrics.count("episode.cancelled")
        metrics.count("tokens.cancelled", report.tokens)
        return
    metrics.count(f"episode.failed.{report.failure}")
    metrics.count("tokens.failed", report.tokens)
    log.warning(
        "episode.failed group=%d sample=%d attempt=%d turns=%d reason=%s error=%s",
        group, report.sample, report.attempt, report.turns, report.failure, report.error,
    )  # fmt: skip

"""Simulates a run in virtual time: an event queue, engines, and a trainer that steps and crashes."""

import heapq
import itertools
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from protocol.errors import Reason, Refused
from protocol.staleness import Policy, is_published, lag, trainable_counts
from services.ledger.interface import RunSpec, TakenBatch
from services.ledger.verify.verifier import AuditResult
from tests.trials.simulation.engines import Action, Fleet
from tests.trials.simulation.scenario import Scenario
from tests.trials.simulation.watched import Twins, Watched

_FOREVER = 1 << 40
_QUIET_MS = 7 * 86_400_000
"""Virtual time without a step after which a run is taken for stuck."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run."""

    audit: AuditResult
    counts: Counter[str]
    calls: Counter[str]
    refused: Counter[str]
    dropped: dict[str, int]
    lags: Counter[int]
    """Trained tokens by lag."""
    virtual_h: float
    wall_s: float


class World:
    """One run. The same scenario gives the same run, whichever ledgers watch it."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.random = random.Random(scenario.seed)
        self.now = 0
        self._queue: list[tuple[int, int, Action]] = []
        self._order = itertools.count()
        self.ledger = Watched(lambda: self.now, random.Random(scenario.seed + 1), scenario.repeat_share)
        self.counts: Counter[str] = Counter()
        self.lags: Counter[int] = Counter()
        self.epochs = 0
        self.running: TakenBatch | None = None
        self.digests = {0: 0}
        self.checkpoint = 0
        self.version = self.published = 0
        self.scored = 0
        self.last_step = 0
        self.over = False

    def beside(self, url: str, run: str) -> None:
        """Let a ledger on the server at `url` make the same decisions."""
        self.ledger = Twins(
            lambda: self.now, random.Random(self.scenario.seed + 1), self.scenario.repeat_share, url, run
        )

    def schedule(self, delay_ms: float, action: Action) -> None:
        """Schedule an action for later."""
        heapq.heappush(self._queue, (self.now + max(1, int(delay_ms)), next(self._order), action))

    async def run(self) -> Outcome:
        """Process events until every group is trained or dropped."""
        began, s = time.monotonic(), self.scenario
        self.fleet = self.make_fleet()
        self.fleet.on_scored = self._on_scored
        spec = RunSpec("simulated", "f", s.groups, _FOREVER, s.bound, drop_window=_FOREVER)
        await self.ledger.call("create", spec)
        await self.new_epoch(0, 0)
        self.fleet.start()
        self._poll_later()
        while not self.over:
            self.now, _, action = heapq.heappop(self._queue)
            await action()
            assert self.now - self.last_step < _QUIET_MS, (
                f"no step for a week: {await self.ledger.memory.status()}"
            )
        audit = await self.ledger.result()
        status = await self.ledger.memory.status()
        assert (audit.issued, audit.trained, audit.dropped) == (status.issued, status.trained, status.dropped)
        return Outcome(
            audit, self.counts + self.fleet.counts, self.ledger.calls, self.ledger.refused,
            dict(status.dropped_by_reason), self.lags,
            self.now / 3_600_000, time.monotonic() - began,
        )  # fmt: skip

    def make_fleet(self) -> Fleet:
        """Return the engines of the run."""
        return Fleet(self.scenario, self.ledger, self.random, lambda: self.now, self.schedule)

    # -- the trainer
    async def new_epoch(self, version: int, digest: int) -> None:
        """Start a trainer at `version`, with weights of `digest`."""
        self.epoch, self.epochs, self.running = f"e{self.epochs}", self.epochs + 1, None
        await self.ledger.call("claim", self.epoch)
        continued = await self.ledger.call("resume", self.epoch, version, digest)
        self.counts["rewinds"] += not continued
        self.version, self.digests[version] = version, digest
        await self.publish()

    async def publish(self) -> None:
        """Publish the committed version without a commit."""
        manifest = b"%d" % self.digests[self.version]
        await self.ledger.call("publish", self.epoch, manifest, self.version)
        self.published = self.version
        await self.fleet.announce(self.epoch, self.version)

    def _is_published(self, version: int) -> bool:
        bound = self.ledger.memory.run_state.bound
        return is_published(version, self.published, self.scenario.publish_every, bound.max_staleness)

    async def _on_scored(self, group: int, token: str) -> None:
        self.scored += 1
        if self.scored >= self.ledger.memory.run_state.bound.groups_per_step:
            await self.take()

    def _poll_later(self) -> None:
        async def poll() -> None:
            await self.take()
            self._poll_later()

        self.schedule(self.scenario.poll_ms, poll)

    async def take(self) -> None:
        """Begin the next step if the ledger allows it."""
        if self.running is not None or self.over:
            return
        try:
            taken: TakenBatch = await self.ledger.call("take", self.epoch)
        except Refused as refusal:
            self.over = refusal.reason is Reason.EXHAUSTED
            if self.published < self.version and self._is_published(self.version):
                self.counts["late publishes"] += 1
                await self.publish()
            self.scored = len(self.ledger.memory.run_state.scored())
            return
        self.running, self.scored = taken, len(self.ledger.memory.run_state.scored())
        duration = self.scenario.step_ms * self.random.lognormvariate(0, 0.5)
        epoch = self.epoch
        crashes = self.random.random() < self.scenario.crash_share

        async def end() -> None:
            await (self.crash() if crashes else self.commit(epoch, taken))

        self.schedule(duration, end)

    async def commit(self, epoch: str, taken: TakenBatch) -> None:
        """Commit the step with every token that may be trained."""
        trained = {}
        strict = self.ledger.memory.run_state.bound.policy is not Policy.MASK
        for group in taken.groups:
            trained[group.group] = trainable_counts(taken.step, group.counts, group.max_staleness)
            masked = sum(group.counts.values()) - sum(trained[group.group].values())
            assert not (masked and strict), f"group {group.group}: {group.counts} in step {taken.step}"
            assert trained[group.group], f"group {group.group} has no token within the bound"
            self.counts["masked_tokens"] += masked
            for version, n in trained[group.group].items():
                self.lags[lag(taken.step, version)] += n
        digest = self.epochs * _FOREVER + taken.step + 1
        report, publishes = b"%d" % taken.step, self._is_published(taken.step + 1)
        manifest = b"%d" % digest if publishes else b""
        self.version = await self.ledger.call(
            "commit", epoch, taken.step, trained, digest=digest, report=report, manifest=manifest
        )
        self.running, self.last_step, self.digests[self.version] = None, self.now, digest
        self.counts["commits"] += 1
        if self.version % self.scenario.checkpoint_steps == 0:
            self.checkpoint = self.version
            await self.ledger.call("checkpointed", self.version)
            self.digests = {version: d for version, d in self.digests.items() if version >= self.version}
        if publishes:
            self.published = self.version
            await self.fleet.announce(epoch, self.version)
        if self.random.random() < self.scenario.change_share:
            await self.change()
        await self.take()

    async def crash(self) -> None:
        """Crash the trainer in its step; the next has the same weights, or rewinds to an older version."""
        self.counts["crashes"] += 1
        version = self.version
        if self.random.random() < self.scenario.rewind_share:
            version = self.random.randint(self.checkpoint, self.version)
            digest = -self.epochs if version == self.version else self.digests[version]
        else:
            digest = self.digests[version]
        await self.new_epoch(version, digest)
        await self.take()

    async def change(self) -> None:
        """Change the bound, policy or batch size."""
        s, pick = self.scenario, self.random.choice
        E, B = (
            pick((0, s.max_staleness, s.max_staleness + 1)),
            pick((max(1, s.groups_per_step // 2), s.groups_per_step, s.groups_per_step * 2)),
        )
        policy: Any = pick(list(Policy)) if s.policy_changes else None
        self.counts["changes"] += 1
        await self.ledger.call("set_bound", max_staleness=E, groups_per_step=B, policy=policy)

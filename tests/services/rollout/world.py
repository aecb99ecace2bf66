"""Runs random histories of weight updates: a trainer, an engine, a steady stream of requests, and all faults.

Real parts: ledger rules (in memory), senders and receivers of a transport, the broadcast edge with a faulty
proxy, the updater of the rollout service, and the `hf` engine. Every completion is recomputed: its tokens
must be those of the versions that it names, and if the ledger accepts it, those of the branch that the ledger
is on.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from hypothesis import strategies as st

from protocol.errors import EngineError, PoisonedError, Refused, WeightError
from protocol.lifecycle import GroupState
from protocol.topics import WEIGHTS, Role
from rollout.engines.base import Completion, EngineConfig, Request, Sampling
from rollout.engines.hf.engine import HFEngine
from rollout.staging.staging import LiveAndStaged
from services.bus.broadcast import Listener
from services.ledger.interface import Lease
from services.rollout.weight_updater import WeightUpdater
from services.runtime.process import Process
from tests.contracts.memory_ledger.ledger import MemoryLedger
from tests.services.bus.harness import RUN, Registry, eventually
from tests.services.bus.history import CONFIG, FAULTS
from tests.services.bus.middle import Fault
from tests.services.rollout.trainer import DAMAGE, Trainer
from tests.services.rollout.versions import VOCAB, Versions

TOKENS = 48
HOUR_MS = 3_600_000


@dataclass(frozen=True)
class Move:
    """One action or fault."""

    name: str
    how: str = ""
    count: int = 0
    faults: tuple[tuple[Fault, int], ...] = ()


MOVES = st.one_of(
    st.builds(Move, st.just("step"), st.sampled_from(DAMAGE)),
    st.just(Move("step")),
    st.just(Move("step")),
    st.builds(Move, st.just("die"), st.sampled_from(["writing", "written", "committed"])),
    st.builds(Move, st.just("restart"), st.sampled_from(["", "zombie"]), st.integers(0, 2)),
    st.builds(Move, st.just("disturb"), faults=FAULTS),
    st.builds(Move, st.sampled_from(["haunt", "kill_engine", "poison", "no_time", "unstaged", "cut"])),
    st.builds(Move, st.sampled_from(["sleep", "wake"])),
    st.builds(Move, st.just("turns"), count=st.integers(1, 20)),
)


class World:
    """One run with one engine at a time."""

    def __init__(self, transport: str, directory: Path, versions: Versions) -> None:
        self.versions = versions
        self.ledger = MemoryLedger()
        self.registry = Registry()
        self.trainer = Trainer(transport, directory / "weights", self.ledger, self.registry, versions)
        self._shared = directory / "weights/engine" if transport == "shared" else None
        self._model = versions.write_config(directory / "model")
        self._stage_timeout_s = 30.0
        self._lives = 0
        self.engine: HFEngine | None = None
        self._updater: WeightUpdater | None = None
        self._engine_task: asyncio.Task[None] | None = None
        self.poisoned = self.accepted = self.checked = 0
        self.spans = 0
        self._processes: list[Process] = []

    @property
    def drafts(self) -> float:
        """Number of versions that engines staged before their manifests arrived."""
        return sum(
            process.metrics.registry.get_sample_value("tether_events_total", {"event": "weights.drafts"}) or 0
            for process in self._processes
        )

    # -- the engine
    async def _engine_life(self) -> None:
        """Run one process of the rollout service, until it is cancelled or its engine is poisoned."""
        self._lives += 1
        config = EngineConfig(name="hf", max_model_len=128, stage_timeout_s=self._stage_timeout_s)
        process = Process(Role.ROLLOUT, cast(Any, None), cast(Any, self.ledger), f"rollout{self._lives}")
        self._processes.append(process)
        shared = self._shared and self._shared / f"{process.incarnation}.msgpack"
        engine = HFEngine(config, self._model, process.incarnation, shared=shared)
        await engine.start()
        try:
            identity: dict[str, Any] = {
                "run": RUN,
                "incarnation": process.incarnation,
                "role": Role.ROLLOUT,
                "config": CONFIG,
            }
            async with Listener(WEIGHTS, discover=self.registry, **identity) as listener:
                updater = WeightUpdater(
                    process, engine, listener, on_abort=lambda groups: None, on_applied=lambda: None
                )
                self.engine, self._updater, self._name = engine, updater, process.incarnation
                async with asyncio.TaskGroup() as tasks:
                    for loop in (updater.listen_loop, updater.poll_loop, updater.apply_loop):
                        tasks.create_task(loop(), name=loop.__name__)
        except* PoisonedError:
            self.poisoned += 1
            with pytest.raises(EngineError):
                await engine.check()
            with pytest.raises(EngineError):
                await engine.generate(Request("poisoned/0", (1,), Sampling(max_tokens=1)))
        finally:
            self.engine = None
            await engine.close()

    async def _engine_loop(self) -> None:
        """Start a fresh engine when one has ended, as the supervisor does."""
        while True:
            async with asyncio.TaskGroup() as tasks:
                self._engine_task = tasks.create_task(_cancelled_is_fine(self._engine_life()), name="engine")

    async def _worker_loop(self, number: int) -> None:
        """Lease, generate, check, accept."""
        count = 0
        while True:
            count += 1
            engine = self.engine
            lease = None
            if engine is not None:
                with suppress(Refused):
                    lease = await self.ledger.lease(
                        request=f"{number}.{count}", engine=self._name, holder="w", lease_ms=HOUR_MS
                    )
            if lease is None or engine is None:
                await asyncio.sleep(0.005)
                continue
            prompt = tuple(torch.randint(VOCAB, (3 + number,)).tolist())
            try:
                found = await engine.generate(
                    Request(f"{lease.group}.{lease.token}/0", prompt, Sampling(TOKENS, temperature=0))
                )
            except EngineError:
                if self.engine is engine:
                    # as in the service: whose engine is dead takes no more leases, and its process ends
                    self.engine = None
                with suppress(Refused):
                    await self.ledger.release(lease.group, lease.token, "engine")
                continue
            await self._finish(lease, prompt, found)

    async def _finish(self, lease: Lease, prompt: tuple[int, ...], found: Completion) -> None:
        counts: dict[int, int] = {}
        start = 0
        for end, version in found.spans:
            counts[version] = counts.get(version, 0) + end - start
            start = end
        self.check(prompt, found, branch=False)
        if len(self.ledger.run_state.of(GroupState.SCORED)) > 3:
            with suppress(Refused):
                await self.ledger.release(lease.group, lease.token, "enough")
            return
        try:
            await self.ledger.accept(lease.group, lease.token, counts)
        except Refused:
            return
        self.accepted += 1
        self.check(prompt, found, branch=True)

    def check(self, prompt: tuple[int, ...], found: Completion, *, branch: bool) -> None:
        """Check that every token is of a published version that its span names.

        With `branch`, of the version on the ledger's branch. Without: two branches may have a version of the
        same number, and a request whose lease is void may have seen both.
        """
        start = 0
        for end, version in found.spans:
            context, tokens = [*prompt, *found.tokens[:start]], found.tokens[start:end]
            if branch:
                assert version < len(self.trainer.branch), f"version {version} is not on the branch"
            candidates = [self.trainer.branch[version]] if branch else self.trainer.published.get(version, [])
            assert self.versions.could_make(candidates, context, tokens), (version, branch, found.spans)
            start = end
            self.spans += 1
        self.checked += 1

    # -- moves
    async def play(self, move: Move) -> None:
        """Carry out a move."""
        trainer, engine = self.trainer, self.engine
        match move.name:
            case "step":
                await trainer.step(damage=move.how)
            case "die":
                await trainer.step(dies=move.how)
            case "restart":
                await trainer.restart(move.count, zombie=move.how == "zombie")
            case "haunt":
                trainer.haunt()
            case "disturb" if trainer.middle is not None:
                trainer.middle.plan.extend(move.faults)
            case "cut" if trainer.middle is not None:
                trainer.middle.cut()
            case "kill_engine" | "no_time":
                self._stage_timeout_s = 0.0 if move.name == "no_time" else 30.0
                await self.new_engine()
            case "poison" if engine is not None:
                _break_commit(engine._model.weights)
            case "unstaged" if engine is not None and trainer.manifest is not None:
                served = engine.served
                with pytest.raises((WeightError, EngineError)):
                    await engine.commit(msgspec.structs.replace(trainer.manifest, version=10_000))
                assert engine.served == served or engine.served.version < 10_000
            case "sleep" | "wake" if (
                engine is not None and self._updater is not None and self._shared is None
            ):
                try:
                    await (self._updater.sleep() if move.name == "sleep" else self._updater.wake())
                except (EngineError, WeightError):
                    assert self.engine is not engine  # killed or poisoned meanwhile
            case "turns":
                await asyncio.sleep(0.002 * move.count)

    async def new_engine(self) -> None:
        """Kill the engine's process once it has loaded its model, and wait for the next one.

        Two loads at once do not work in one process.
        """
        await eventually(lambda: self.engine is not None)
        lives = self._lives
        if self._engine_task is not None:
            self._engine_task.cancel()
        await eventually(lambda: self._lives > lives)

    async def settle(self) -> None:
        """End all faults and wait until a new version is published, applied, reported and used."""
        self._stage_timeout_s = 30.0
        await self.new_engine()
        trainer = self.trainer
        await trainer.restart()
        assert trainer.manifest is not None
        goal = (trainer.epoch, trainer.manifest.version)
        await eventually(
            lambda: self.engine is not None and (self.engine.served.epoch, self.engine.served.version) == goal
        )
        await eventually(lambda: self.ledger.run_state.engines.get(self._name) == goal)
        checked = self.checked
        await eventually(lambda: self.checked > checked + 2)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["World"]:
        await self.trainer.begin()
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = [self._engine_loop(), self._worker_loop(0), self._worker_loop(1)]
                running = [
                    tasks.create_task(loop, name=f"world.{number}") for number, loop in enumerate(loops)
                ]
                try:
                    yield self
                finally:
                    for task in running:
                        task.cancel()
        finally:
            await self.trainer.close()


async def _cancelled_is_fine(life: Awaitable[None]) -> None:
    """Await a life; cancelling it ends its own task only."""
    with suppress(asyncio.CancelledError):
        await life


def _break_commit(weights: Any) -> None:
    """Make the next commit fail after it has copied some tensors."""
    if isinstance(weights, LiveAndStaged):
        weights.copy[next(reversed(weights.copy))] = torch.empty(1, 2, 3)
    else:
        name, target = list(weights._live.items())[-1]
        weights._live[name] = torch.zeros(()).expand(target.shape)

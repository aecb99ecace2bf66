"""Turns on a shared GPU: trainer and engines never hold it together, and every wait ends."""

import asyncio
import dataclasses
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from protocol.errors import SettingsError, TetherError
from protocol.topics import Role
from services.gpu_sharing.device_lock import DeviceLock
from services.gpu_sharing.turn import HOLDS
from services.ledger.embedded_server import EmbeddedServer
from services.ledger.interface import Peer
from services.rollout.gpu_turn import EngineGpuTurn
from services.runtime.process import Process, open_process
from services.settings.sections import Settings
from services.trainer.gpu_turn import TrainerGpuTurn
from tests.integration.loop import ROOT, settings_for


@pytest_asyncio.fixture
async def settings(tmp_path: Path) -> AsyncIterator[Settings]:
    server = EmbeddedServer(tmp_path / "ledger")
    await server.start()
    try:
        made = settings_for(tmp_path, "stragglers.toml")
        yield dataclasses.replace(made, ledger=dataclasses.replace(made.ledger, url=server.url))
    finally:
        await server.stop()


def patient(settings: Settings, wait_s: float) -> Settings:
    return dataclasses.replace(settings, colocated=dataclasses.replace(settings.colocated, wait_s=wait_s))


@contextmanager
def trainers(process: Process) -> Iterator[TrainerGpuTurn]:
    with closing(DeviceLock(process.settings.run_dir)) as device:
        yield TrainerGpuTurn(process, device)


@contextmanager
def engines(process: Process) -> Iterator[EngineGpuTurn]:
    with closing(DeviceLock(process.settings.run_dir)) as device:
        yield EngineGpuTurn(process, device)


async def holders(process: Process) -> list[str]:
    return [peer.incarnation for peer in await process.ledger.peers(Role.ROLLOUT) if peer.info.get(HOLDS)]


async def test_an_engine_waits_until_a_trainer_has_ended_its_turn_and_then_holds_the_device(
    settings: Settings,
) -> None:
    async with open_process(Role.ROLLOUT, settings, "rollout.0") as worker, asyncio.TaskGroup() as tasks:
        with engines(worker) as turn:
            taking = tasks.create_task(turn.acquire(), name="take")
            async with open_process(
                Role.TRAINER, settings, "trainer"
            ) as trainer:  # registered, and silent about turns: it has just started
                with trainers(trainer) as mine:
                    turn.notify()
                    await mine.acquire()
                    assert mine.has_device
                    assert await holders(trainer) == []
                    assert not taking.done()
                    await mine.release()
                    turn.notify()
                    async with asyncio.timeout(60):
                        assert await taking
                    assert await holders(trainer) == [worker.incarnation]


async def test_a_trainer_waits_for_engines_and_gives_up_by_name(settings: Settings) -> None:
    settings = patient(settings, 0.2)
    async with (
        open_process(Role.ROLLOUT, settings, "rollout.0") as worker,
        open_process(Role.TRAINER, settings, "trainer") as trainer,
    ):
        with trainers(trainer) as mine, engines(worker) as turn:
            await mine.acquire()
            await mine.release()
            assert await turn.acquire()
            with pytest.raises(
                TetherError,
                match=rf"^{worker.incarnation} still held the device after 0\.2 s \(colocated\.wait_s\)",
            ):
                await mine.acquire()
            assert not mine.has_device


async def test_a_trainer_does_not_begin_beside_an_engine_that_the_registry_has_lost(
    settings: Settings,
) -> None:
    settings = patient(settings, 0.2)
    async with (
        open_process(Role.ROLLOUT, settings, "rollout.0") as worker,
        open_process(Role.TRAINER, settings, "trainer") as trainer,
    ):
        with trainers(trainer) as mine, engines(worker) as turn:
            await mine.acquire()
            await mine.release()
            assert await turn.acquire()
            await trainer.ledger.unregister(
                worker.incarnation
            )  # as after a ledger that was away for longer than ttl_s
            with pytest.raises(TetherError, match=r"\(pid \d+\) still held the device"):
                await mine.acquire()
            await turn.release()
            await mine.acquire()


async def test_a_trainer_does_not_wait_for_an_engine_that_has_died(settings: Settings) -> None:
    async with open_process(Role.TRAINER, settings, "trainer") as trainer:
        await trainer.ledger.register(Peer(Role.ROLLOUT, "dead", {HOLDS: True}), ttl_ms=600_000)
        with trainers(trainer) as mine:
            await mine.acquire()


async def test_an_engine_is_not_barred_for_ever_in_its_own_turn(settings: Settings) -> None:
    settings = patient(settings, 0.2)
    async with (
        open_process(Role.ROLLOUT, settings, "rollout.0") as worker,
        open_process(Role.TRAINER, settings, "trainer") as trainer,
    ):
        with (
            trainers(trainer) as mine,
            engines(worker) as turn,
            closing(DeviceLock(settings.run_dir)) as other,
        ):
            await mine.acquire()
            await mine.release()
            assert other.try_acquire(exclusive=True)
            with pytest.raises(
                TetherError,
                match=r"still held the device after 0\.2 s \(colocated\.wait_s\), in the engines' turn",
            ):
                await turn.acquire()
            assert await holders(trainer) == []


async def test_a_worker_that_is_to_stop_does_not_wait_for_its_turn(settings: Settings) -> None:
    async with open_process(Role.ROLLOUT, settings, "rollout.0") as worker:
        worker.stop.set()
        with engines(worker) as turn:
            assert not await turn.acquire()


async def test_a_run_directory_that_is_not_there_is_named(settings: Settings) -> None:
    with pytest.raises(SettingsError, match=r"elsewhere/device\.lock: No such file"):
        DeviceLock(settings.run_dir / "elsewhere")


async def test_only_one_of_two_that_take_the_device_at_once_gets_it(settings: Settings) -> None:
    async with (
        open_process(Role.ROLLOUT, settings, "rollout.0") as worker,
        open_process(Role.TRAINER, settings, "trainer") as trainer,
    ):
        with trainers(trainer) as mine, engines(worker) as turn:
            for _ in range(20):
                await mine.acquire()
                await mine.release()
                async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
                    taking = tasks.create_task(turn.acquire(), name="take")
                    beginning = tasks.create_task(mine.acquire(), name="begin")
                    await asyncio.wait([taking, beginning], return_when=asyncio.FIRST_COMPLETED)
                    assert taking.done() != beginning.done()
                    if taking.done():
                        await turn.release()
                        await beginning
                    await mine.release()
                    turn.notify()
                    await taking
                await turn.release()


class Sides:
    """Two engines and a trainer that use a device as often as they can, while faults hit them."""

    def __init__(self) -> None:
        self.engines: set[EngineGpuTurn] = set()
        self.trainer = False
        self.uses = {"trainer": 0, "engines": 0}
        self.turns: set[EngineGpuTurn] = set()

    async def train(self, process: Process) -> None:
        with trainers(process) as mine:
            try:
                while True:
                    await mine.acquire()
                    self.trainer = True
                    self.uses["trainer"] += 1
                    assert not self.engines
                    await asyncio.sleep(0.001)  # the others' chance
                    assert not self.engines
                    self.trainer = False
                    await mine.release()
                    for turn in self.turns:
                        turn.notify()
                    await asyncio.sleep(0.005)
            finally:
                self.trainer = False

    async def generate(self, process: Process) -> None:
        with engines(process) as turn:
            self.turns.add(turn)
            try:
                while await turn.acquire():
                    self.engines.add(turn)
                    self.uses["engines"] += 1
                    assert not self.trainer
                    await asyncio.sleep(0.001)
                    assert not self.trainer
                    self.engines.remove(turn)
                    await turn.release()
            finally:
                self.engines.discard(turn)
                self.turns.remove(turn)


@pytest.mark.parametrize("seed", range(3))
async def test_trainer_and_engines_are_never_on_the_device_together_whatever_is_forgotten_or_killed(
    settings: Settings, seed: int
) -> None:
    chance, sides = random.Random(seed), Sides()
    async with AsyncExitStack() as stack, asyncio.timeout(400), asyncio.TaskGroup() as tasks:
        processes = [
            await stack.enter_async_context(open_process(role, settings, str(role)))
            for role in (Role.TRAINER, *[Role.ROLLOUT] * 2)
        ]
        bodies = [sides.train, sides.generate, sides.generate]
        lives = [tasks.create_task(body(process)) for body, process in zip(bodies, processes, strict=True)]
        while min(sides.uses.values()) < 40:
            number = chance.randrange(3)
            if chance.random() < 0.7:
                await processes[0].ledger.unregister(processes[number].incarnation)
            else:
                lives[number].cancel()
                await asyncio.wait([lives[number]])
                lives[number] = tasks.create_task(bodies[number](processes[number]))
            await asyncio.sleep(chance.random() / 100)
            await processes[number].register()
        for life in lives:
            life.cancel()


@contextmanager
def owned(run_dir: Path, *words: str) -> Iterator[tuple["subprocess.Popen[str]", psutil.Process]]:
    """Start a process that holds the device's lock and its child; both are killed with the block."""
    command = [sys.executable, "-m", "tests.services.gpu_sharing.device_owner", str(run_dir), *words]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as owner:
        try:
            assert owner.stdout is not None
            child = psutil.Process(int(owner.stdout.readline()))
            try:
                yield owner, child
            finally:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        finally:
            owner.kill()


async def suspended(child: psutil.Process) -> None:
    """Stop a process: the signal alone does not yet, until one of its threads has seen it."""
    child.suspend()
    async with asyncio.timeout(30):
        while child.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110 (the kernel tells only a parent)
            await asyncio.sleep(0.01)


async def until_free(device: DeviceLock) -> None:
    async with asyncio.timeout(30):
        while not device.try_acquire(exclusive=True):  # noqa: ASYNC110 (another process leaves it)
            await asyncio.sleep(0.01)


async def test_a_killed_worker_keeps_the_device_until_its_engines_processes_have_ended(
    settings: Settings,
) -> None:
    settings = patient(settings, 0.5)
    async with open_process(Role.TRAINER, settings, "trainer") as trainer:
        with (
            trainers(trainer) as mine,
            owned(settings.run_dir) as (owner, child),
            closing(DeviceLock(settings.run_dir)) as device,
        ):
            assert set(device.holders()) == {owner.pid, child.pid}
            await suspended(child)  # else it ends at once when its owner has
            owner.kill()
            owner.wait()
            with pytest.raises(TetherError, match=rf"^\S+ \(pid {child.pid}\) still held the device"):
                await mine.acquire()
            child.resume()
            await until_free(device)
            device.release()
            await mine.acquire()


async def test_a_worker_that_is_killed_asleep_holds_nothing_although_its_engines_processes_live(
    settings: Settings,
) -> None:
    with owned(settings.run_dir, "asleep") as (owner, child), closing(DeviceLock(settings.run_dir)) as device:
        await suspended(child)
        owner.kill()
        owner.wait()
        assert device.holders() == {}
        assert device.try_acquire(exclusive=True)


async def test_the_ranks_of_a_trainer_hold_the_device_until_the_last_has_ended(settings: Settings) -> None:
    with owned(settings.run_dir, "ranks") as (owner, child), closing(DeviceLock(settings.run_dir)) as device:
        assert set(device.holders()) == {owner.pid, child.pid}
        await suspended(child)
        owner.kill()
        owner.wait()
        assert not device.try_acquire(exclusive=False)
        child.kill()
        await until_free(device)

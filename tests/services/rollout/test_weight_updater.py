"""Tests a worker whose engine can never stage a version, and one whose engine may at a later attempt."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch

from protocol.codec import encode_payload
from protocol.errors import UnfitVersion
from protocol.messages import WeightManifest
from protocol.staleness import Bound, Policy
from protocol.topics import WEIGHTS, Role
from rollout.engines.base import EngineConfig
from rollout.engines.contract.models import weights, write_shm
from rollout.engines.hf.engine import HFEngine
from services.bus.broadcast import Listener
from services.ledger.interface import Peer, RunSpec
from services.rollout.weight_updater import WeightUpdater
from services.runtime.errors import EXIT_SETTINGS, describe_error
from services.runtime.process import Process
from tests.contracts.memory_ledger.ledger import MemoryLedger
from tests.services.bus.harness import DEADLINE_S, RUN, Registry, eventually
from tests.services.bus.history import CONFIG
from tests.services.rollout.versions import Versions

NORM = "model.norm.weight"
TTL_MS = 3_600_000


@dataclass
class Worker:
    """A worker's updater, with the ledger that names its versions."""

    ledger: MemoryLedger
    process: Process
    engine: HFEngine
    directory: Path
    right: Mapping[str, torch.Tensor]

    async def publish(self, epoch: str, tensors: Mapping[str, torch.Tensor]) -> WeightManifest:
        """Have a new trainer publish version 0."""
        await self.ledger.claim(epoch)
        manifest = write_shm(self.directory / epoch, tensors, 0, epoch=epoch)
        await self.ledger.resume(epoch, 0, manifest.digest)
        await self.ledger.publish(epoch, encode_payload(manifest), 0)
        return manifest

    async def run(self, epoch: str) -> None:
        """Register the trainer of an epoch."""
        await self.ledger.register(Peer(Role.TRAINER, "trainer.1", {"epoch": epoch}), TTL_MS)

    @property
    def failures(self) -> float:
        event = {"event": "weights.failed"}
        return self.process.metrics.registry.get_sample_value("tether_events_total", event) or 0


@asynccontextmanager
async def worker(directory: Path) -> AsyncIterator[Worker]:
    """Run the loops of an updater while the block does."""
    versions, ledger = Versions(), MemoryLedger()
    await ledger.create(
        RunSpec(
            run=RUN, fingerprint="f", prompts=None, steps=9, bound=Bound(1, 1, Policy.MASK), max_attempts=9
        )
    )
    process = Process(Role.ROLLOUT, cast(Any, None), cast(Any, ledger), "rollout.0")
    model = versions.write_config(directory / "model")
    engine = HFEngine(EngineConfig(name="hf", max_model_len=32), model, process.incarnation)
    await engine.start()
    identity: dict[str, Any] = {"run": RUN, "incarnation": process.incarnation, "role": Role.ROLLOUT}
    try:
        async with Listener(WEIGHTS, discover=Registry(), config=CONFIG, **identity) as listener:
            updater = WeightUpdater(process, engine, listener, lambda groups: None, lambda: None)
            async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
                loops = [updater.poll_loop(), updater.apply_loop()]
                running = [tasks.create_task(loop, name=loop.__name__) for loop in loops]
                yield Worker(ledger, process, engine, directory, weights(versions.model))
                for task in running:
                    task.cancel()
    finally:
        await engine.close()


WRONG = {
    "shape": (
        lambda tensors: {**tensors, NORM: torch.ones(5)},
        rf"tensor {NORM} is float32\[5\], the engine's {NORM} is float32\[32\]",
    ),
    "type": (
        lambda tensors: {**tensors, NORM: tensors[NORM].double()},
        rf"tensor {NORM} is float64\[32\], the engine's {NORM} is float32\[32\]",
    ),
    "lacking": (
        lambda tensors: {name: tensor for name, tensor in tensors.items() if name != NORM},
        rf"version 0 lacks tensor {NORM}",
    ),
    "unknown": (
        lambda tensors: {**tensors, "more": torch.ones(3)},
        r"the engine has no parameter for tensor more",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
async def test_versions_that_do_not_fit_end_the_worker_as_wrong_settings_do(
    tmp_path: Path, fault: str
) -> None:
    change, words = WRONG[fault]
    found: list[Worker] = []

    async def serve() -> None:
        async with worker(tmp_path) as made:
            found.append(made)
            await made.run("e1")
            await made.publish("e1", change(made.right))
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as error:
        await serve()
    assert error.group_contains(UnfitVersion, match=rf"engine rollout\.0\..*{words}")
    line, code = describe_error(error.value)
    assert code == EXIT_SETTINGS
    assert NORM in line or "more" in line
    assert found[0].failures == 1
    assert found[0].engine.served.version == -1


async def test_a_former_trainers_version_that_does_not_fit_is_left_to_the_next_trainer(
    tmp_path: Path,
) -> None:
    async with worker(tmp_path) as made:
        await made.run("e2")  # it loads its model, and has taken nothing over yet
        await made.publish("e1", {**made.right, NORM: torch.ones(5)})
        await eventually(lambda: made.failures >= 3)
        manifest = await made.publish("e2", made.right)
        await eventually(lambda: made.engine.served.epoch == "e2")
    assert made.engine.served.digest == manifest.digest


async def test_a_version_whose_files_are_not_there_yet_is_tried_again(tmp_path: Path) -> None:
    async with worker(tmp_path) as made:
        await made.run("e1")
        manifest = write_shm(tmp_path / "elsewhere", made.right, 0)
        moved = msgspec.structs.replace(manifest, location=str(tmp_path / "late"))
        await made.ledger.claim("e1")
        await made.ledger.resume("e1", 0, manifest.digest)
        await made.ledger.publish("e1", encode_payload(moved), 0)
        await eventually(lambda: made.failures >= 3)
        (tmp_path / "elsewhere").rename(tmp_path / "late")
        await eventually(lambda: made.engine.served.version == 0)
    assert made.engine.served.digest == manifest.digest

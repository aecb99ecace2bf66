"""Tests transport `shared`: the trainer continues only with an engine that serves its version."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import torch

from protocol.device.shared_layout import DESCRIPTION_KEY
from protocol.device.shared_tensors import Description, ProcessIdentity
from protocol.errors import SettingsError, TetherError
from protocol.messages import WeightManifest
from protocol.staleness import Bound, Policy
from protocol.topics import Role
from services.ledger.embedded_server import EmbeddedServer
from services.ledger.interface import RunSpec
from services.runtime.process import Process, open_process
from services.settings.checks import check_workers
from services.settings.sections import Settings
from services.settings.shared_weights import can_share
from services.trainer.shared_engine import SharedEngine
from tests.integration.loop import settings_for
from trainer.config import WeightConfig
from trainer.weights.shared import SharedSender

SHARED = ("weights.transport=shared", "trainer.backend=reference", "engine.name=hf")
EPOCH = "e1"


@dataclass
class Trainer:
    """The trainer's side, and what it attached to."""

    process: Process
    sender: SharedSender
    share: SharedEngine
    attached: list[Path] = field(default_factory=list)

    async def ready(self, version: int = 0) -> bool:
        """Return whether it may continue from a version."""

        async def attach(path: Path) -> None:
            self.attached.append(path)

        async with asyncio.timeout(60):
            return await self.share.ready(manifest_of(version), attach)


def manifest_of(version: int) -> WeightManifest:
    return WeightManifest(
        epoch=EPOCH, version=version, transport="shared", location="", buckets=(), tensors=()
    )


@pytest_asyncio.fixture
async def settings(tmp_path: Path) -> AsyncIterator[Settings]:
    server = EmbeddedServer(tmp_path / "ledger")
    await server.start()
    try:
        made = settings_for(tmp_path, "demo.toml", *SHARED)
        yield dataclasses.replace(made, ledger=dataclasses.replace(made.ledger, url=server.url))
    finally:
        await server.stop()


@asynccontextmanager
async def trainer(settings: Settings, timeout_s: float = 30) -> AsyncIterator[Trainer]:
    async with open_process(Role.TRAINER, settings, "trainer") as process:
        spec = RunSpec(
            run=process.run, fingerprint="f", prompts=None, steps=9, bound=Bound(1, 1, Policy.MASK)
        )
        await process.ledger.create(spec)
        await process.ledger.claim(EPOCH)
        await process.ledger.resume(EPOCH, 0, 1)
        sender = SharedSender(settings.run_dir, {"a": torch.nn.Parameter(torch.zeros(3))})
        yield Trainer(process, sender, SharedEngine(process, sender, timeout_s))
        sender.close()


@asynccontextmanager
async def engine(settings: Settings, name: str, *, serves: bool = True) -> AsyncIterator[Process]:
    """A worker, and the process that its weights are memory of, which is killed at the end."""
    owner = await asyncio.create_subprocess_exec("sleep", "600")
    path = settings.run_dir / f"{name}.msgpack"
    path.write_bytes(msgspec.msgpack.encode(Description(ProcessIdentity.of(owner.pid), (), {})))
    async with open_process(Role.ROLLOUT, settings, name) as process, asyncio.TaskGroup() as tasks:
        process.info[DESCRIPTION_KEY] = str(path)
        await process.register()
        if serves:
            await process.ledger.applied(process.incarnation, EPOCH, 0)
        heartbeat = tasks.create_task(process.heartbeat_loop())
        try:
            yield process
        finally:
            owner.kill()
            await owner.wait()
            heartbeat.cancel()


async def test_a_trainer_attaches_once_to_the_engine_that_serves_its_version(settings: Settings) -> None:
    async with trainer(settings) as mine, asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(mine.ready())
        async with (
            open_process(Role.ROLLOUT, settings, "other"),
            engine(settings, "stale", serves=False),
            engine(settings, "fresh"),
        ):
            assert await waiting
            assert mine.attached == [settings.run_dir / "fresh.msgpack"]
            assert await mine.ready()
            assert len(mine.attached) == 1


async def test_a_trainer_does_not_go_on_before_its_engine_serves_what_was_published(
    settings: Settings,
) -> None:
    async with trainer(settings, timeout_s=0.3) as mine, engine(settings, "rollout.0") as worker:
        assert await mine.ready()
        with pytest.raises(
            TetherError,
            match=rf"engine {worker.incarnation} did not serve version 1 within 0.3 s \(weights\.timeout_s\)",
        ):
            await mine.ready(1)


async def test_a_trainer_ends_with_its_engine_even_if_another_one_has_come(settings: Settings) -> None:
    async with trainer(settings) as mine:
        async with engine(settings, "first") as first:
            assert await mine.ready()
        async with engine(settings, "second"):
            with pytest.raises(TetherError, match=rf"engine {first.incarnation}, whose weights .* has ended"):
                await mine.ready()


async def test_a_registration_that_ran_out_does_not_end_a_trainer_whose_engine_lives(
    settings: Settings,
) -> None:
    async with trainer(settings) as mine, engine(settings, "rollout.0") as worker:
        assert await mine.ready()
        async with asyncio.timeout(60):
            while found := await mine.process.ledger.peers(Role.ROLLOUT):
                await mine.process.ledger.register(found[0], ttl_ms=1)
        mine.share.check()
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(mine.ready())
            await asyncio.sleep(0)
            await worker.register()
        assert waiting.result()


async def test_the_next_trainer_does_not_attach_to_an_engine_that_is_gone_and_still_registered(
    settings: Settings,
) -> None:
    async with trainer(settings) as mine:
        async with engine(settings, "gone") as gone:
            pass
        async with open_process(Role.ROLLOUT, settings, "other") as other:
            other.info[DESCRIPTION_KEY] = gone.info[DESCRIPTION_KEY]
            await other.register()
            await other.ledger.applied(other.incarnation, EPOCH, 0)
            async with engine(settings, "fresh"):
                assert await mine.ready()
        assert mine.attached == [settings.run_dir / "fresh.msgpack"]


async def test_a_trainer_that_waits_for_groups_sees_its_engine_go(settings: Settings) -> None:
    async with trainer(settings) as mine:
        async with asyncio.TaskGroup() as tasks, engine(settings, "first"):
            assert await mine.ready()
            watching = tasks.create_task(mine.share.watch_loop())
            await asyncio.sleep(0)
            watching.cancel()
        async with asyncio.timeout(60):
            with pytest.raises(TetherError, match="has ended"):
                await mine.share.watch_loop()


async def test_a_trainer_that_is_to_stop_does_not_wait(settings: Settings) -> None:
    async with trainer(settings) as mine, asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(mine.ready())
        await asyncio.sleep(0)
        mine.process.stop.set()
        assert not await waiting
        assert mine.attached == []


async def test_a_trainer_keeps_its_masters_until_its_engine_has_copied_or_left(settings: Settings) -> None:
    async with trainer(settings) as mine, asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        await mine.share.wait_until_copied(manifest_of(1))  # it never attached
        async with engine(settings, "rollout.0"):
            assert await mine.ready()
            await mine.share.wait_until_copied(manifest_of(0))
            ending = tasks.create_task(mine.share.wait_until_copied(manifest_of(1)))
            for _ in range(10):
                await mine.process.ledger.status()
            assert mine.process.waits == ["the engine to copy the last weights"]
        await ending


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "trainer.backend=megatron",
            "trainer.backend is 'megatron'; with engine.name 'hf' it must be 'reference'",
        ),
        (
            "engine.name=megatron",
            "trainer.backend is 'reference'; with engine.name 'megatron' it must be 'megatron'",
        ),
        ("engine.name=sglang", "engine.name is 'sglang'; it must be hf or megatron or vllm"),
        (
            "parallel.tensor_model_parallel_size=2",
            "[parallel] and [placement] ask for 2 ranks, 2 of them tensor ranks; the trainer must have as "
            "many tensor ranks as the engine, 1",
        ),
        ("engine.tensor_parallel_size=2", "engine.tensor_parallel_size is 2"),
        ("engine.enable_sleep_mode=true", "engine.enable_sleep_mode is true"),
        ("services.rollouts=2", "services.rollouts is 2; there can be one"),
        ("services.pool=[{count=1}]", "services.pool names several rollout workers"),
        ("lora.rank=4", "lora.rank is 4; engine.name 'hf' does not keep the base of adapters"),
        ("trainer.num_mini_batches=2", "a step makes 2 updates; it must be one: the second"),
        ("trainer.publish_every=2", "trainer.publish_every is 2; it must be 1"),
        ("colocated.enabled=true", "colocated.enabled is true"),
        ("trainer.dtype=bfloat16", "trainer.dtype is bfloat16, engine.dtype float32"),
        ("services.trainer_gpus=1", "services.trainer_gpus is '1', services.rollout_gpus ''"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused_by_name(
    tmp_path: Path, override: str, said: str
) -> None:
    with pytest.raises(SettingsError) as error:
        settings_for(tmp_path, "demo.toml", *SHARED, override)
    assert str(error.value).startswith("setting weights.transport: with 'shared', ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_settings_that_go_with_it_are_taken(tmp_path: Path) -> None:
    settings_for(
        tmp_path,
        "demo.toml",
        *SHARED,
        "engine.name=vllm",
        "services.trainer_gpus=1",
        "services.rollout_gpus='1,2'",
    )
    settings_for(tmp_path, "demo.toml", *SHARED, "engine.name=megatron", "trainer.backend=megatron")
    ranks = ("engine.tensor_parallel_size=2", "parallel.tensor_model_parallel_size=2")
    settings_for(tmp_path, "demo.toml", *SHARED, "engine.name=vllm", "trainer.backend=megatron", *ranks)
    settings_for(
        tmp_path,
        "demo.toml",
        *SHARED,
        "trainer.dtype=bfloat16",
        "engine.dtype=bfloat16",
        "services.rollouts=0",
    )


ADAPTERS = ("lora.rank=4", "engine.name=megatron", "trainer.backend=megatron")


def test_adapters_go_with_what_masters_forbid(tmp_path: Path) -> None:
    free = ("services.rollouts=2", "trainer.num_mini_batches=2", "trainer.publish_every=2")
    settings = settings_for(tmp_path, "demo.toml", *SHARED, *ADAPTERS, *free)
    check_workers(settings, 5)
    for wrong, said in (
        ("services.rollout_gpus='0,1'", "any may be the one that does"),
        ("colocated.enabled=true", "colocated.enabled is true"),
    ):
        with pytest.raises(SettingsError) as error:
            settings_for(tmp_path, "demo.toml", *SHARED, *ADAPTERS, *free, wrong)
        assert said in str(error.value)


@pytest.mark.parametrize("trainer_gpus", ["0", "0,1"])
def test_a_second_worker_has_to_be_on_the_gpus_of_the_trainers_ranks(
    tmp_path: Path, trainer_gpus: str
) -> None:
    """Trainer and one worker are on GPU 0; the second would be on the next GPU of the list."""
    gpus = (f"services.trainer_gpus='{trainer_gpus}'", "services.rollout_gpus='0,1'")
    with pytest.raises(SettingsError, match=r"2 rollout workers are on .*'0,1'; those that can"):
        settings_for(tmp_path, "demo.toml", *SHARED, *ADAPTERS, *gpus, "services.rollouts=2")
    settings = settings_for(tmp_path, "demo.toml", *SHARED, *ADAPTERS, *gpus)
    check_workers(settings, 1)
    with pytest.raises(SettingsError, match=r"rollouts=2: .* services\.rollout_gpus is '0,1'"):
        check_workers(settings, 2)
    one = ("services.trainer_gpus='0,1'", "services.rollout_gpus='0'", "services.rollouts=2")
    check_workers(settings_for(tmp_path, "demo.toml", *SHARED, *ADAPTERS, *one), 5)


MIXED = "services.pool=[{count=1, engine={name='megatron'}}, {count=2, engine={name='vllm'}}]"


def test_adapters_go_to_workers_that_share_and_to_others(tmp_path: Path) -> None:
    gpus = ("services.trainer_gpus='0'", "services.rollout_gpus='0,1,2'")
    for engine in ("megatron", "vllm"):  # a worker's own settings have its entry's engine
        settings = settings_for(
            tmp_path, "demo.toml", *SHARED, *ADAPTERS, *gpus, MIXED, f"engine.name={engine}"
        )
        assert can_share(settings.engine, settings.lora) == (engine == "megatron")
        check_workers(settings, 3)
        with pytest.raises(SettingsError, match=r"rollouts=4: .* services\.rollout_gpus is '0,1,2'"):
            check_workers(settings, 4)  # the fourth would be a second one that shares
    with pytest.raises(SettingsError, match=r"engine\.name is 'sglang'; it must be"):
        settings_for(tmp_path, "demo.toml", *SHARED, *ADAPTERS, "services.pool=[{engine={name='sglang'}}]")
    two = "services.pool=[{}, {engine={name='megatron', tensor_parallel_size=2}}]"
    with pytest.raises(SettingsError, match=r"engine\.tensor_parallel_size is 2; it must be 1"):
        settings_for(tmp_path, "demo.toml", *SHARED, *ADAPTERS, two)
    with pytest.raises(SettingsError, match=r"services\.pool .* under \[lora\] all get the adapters"):
        settings_for(tmp_path, "demo.toml", *SHARED, *ADAPTERS, MIXED, "lora.rank=0")


def test_a_second_worker_is_refused() -> None:
    check_workers(Settings(), 5)
    masters = dataclasses.replace(Settings(), weights=WeightConfig(transport="shared"))
    check_workers(masters, 1)
    with pytest.raises(SettingsError, match=r"rollouts=2: .* one rollout worker"):
        check_workers(masters, 2)

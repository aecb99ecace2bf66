"""What a cancelled staging leaves behind: nothing staged, and no thread that still writes to the copy of the
next one."""

import asyncio
import gc
import os
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from protocol.device.bounded_init import MAX_STUCK
from protocol.errors import EngineError, PoisonedError, WeightError
from protocol.messages import WeightManifest
from rollout.engines.base import EngineConfig, Request, Sampling
from rollout.engines.hf.engine import HFEngine
from rollout.staging.in_process import InProcessStaging
from rollout.staging.loader_trace import trace
from rollout.staging.rank import RankStaging
from rollout.staging.ranks import AllRanksStaging
from rollout.staging.staging import Staging, whole_source
from tests.contracts.engine_models import tiny_model, write_shm
from tests.protocol.device.stuck import Library, stuck
from trainer.config import WeightConfig
from trainer.weights.nccl import NcclSender

OLD, NEW = {"a": torch.ones(4)}, {"a": torch.full((4,), 2.0)}


def staging() -> Staging:
    return Staging({"a": whole_source(torch.empty(4))})


async def test_stage_is_refused_until_the_thread_of_a_cancelled_one_has_let_go(tmp_path: Path) -> None:
    updates = InProcessStaging(staging(), timeout_s=20)
    stuck, good = write_shm(tmp_path / "v1", OLD, 1), write_shm(tmp_path / "v2", NEW, 2)
    pipe = tmp_path / "v1" / "bucket_00000.bin"
    pipe.unlink()
    os.mkfifo(pipe)  # opening it waits for a writer
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        fetching = tasks.create_task(updates.stage(stuck))
        for _ in range(2):
            await asyncio.sleep(0)
            fetching.cancel()
        await asyncio.wait([fetching])
        with pytest.raises(WeightError, match="being staged"):
            await updates.stage(good)
        with pipe.open("wb"):
            pass
        while True:
            try:
                await updates.stage(good)
                break
            except WeightError:
                await asyncio.sleep(0.01)
    assert updates.staging.take(good).version == 2


def test_fetch_that_is_cancelled_before_it_begins_ends_and_the_next_one_does_not(tmp_path: Path) -> None:
    copy = staging()
    manifest = write_shm(tmp_path / "v1", OLD, 1)
    copy.cancel()
    with pytest.raises(WeightError, match="cancelled"):
        copy.fetch(manifest, 10)
    assert copy.fetch(manifest, 10) == 16


async def test_engine_that_ends_while_it_is_asked_refuses(tmp_path: Path) -> None:
    """Between the look whether it lives and the handing over there is a moment in which its thread may
    end."""

    class Ending(HFEngine):
        async def check(self) -> None:
            await super().check()
            await self.close()

    tiny_model(1).config.save_pretrained(tmp_path)
    for ask in (
        lambda engine: engine.generate(Request("r/0", (1,), Sampling(4))),
        lambda engine: engine.pause(),
    ):
        engine = Ending(EngineConfig(name="hf"), tmp_path, "e")
        await engine.start()
        with pytest.raises(EngineError, match="closed"):
            async with asyncio.timeout(20):
                await ask(engine)


async def test_refusal_after_its_caller_was_cancelled_is_no_complaint_of_the_loop(tmp_path: Path) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    tiny_model(1).config.save_pretrained(tmp_path)
    engine = HFEngine(EngineConfig(name="hf"), tmp_path, "e")
    await engine.start()
    async with asyncio.TaskGroup() as tasks:
        with engine._wake:  # the decoding thread waits
            committing = tasks.create_task(
                engine.commit(write_shm(tmp_path / "v1", OLD, 1))
            )  # it was not staged
            await asyncio.sleep(0)
            committing.cancel()
            await asyncio.wait([committing])
    del committing  # with what it waited for
    await engine.close()
    await asyncio.sleep(0)
    gc.collect()
    assert complaints == []


async def test_a_staging_that_is_cancelled_twice_leaves_ranks_that_can_stage_again(tmp_path: Path) -> None:
    good = write_shm(tmp_path / "v1", OLD, 1)
    copy = staging()
    staged = {
        "state": "staged",
        "error": "",
        "epoch": good.epoch,
        "version": 1,
        "digest": good.digest,
        "covered": 16,
    }
    silent, asked = asyncio.Event(), asyncio.Event()

    async def ask(method: str, *arguments: Any) -> list[Any]:
        if not silent.is_set():
            asked.set()
            await silent.wait()
        if method == "stage":
            copy.fetch(good, 10)
        return [staged]

    updates = AllRanksStaging(ask, ask, stage_timeout_s=20, call_timeout_s=20)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        staging_now = tasks.create_task(updates.stage(good))
        await asked.wait()
        staging_now.cancel()
        await asyncio.sleep(0)  # it asks the ranks to forget the version
        staging_now.cancel()
        await asyncio.wait([staging_now])
        assert not updates.is_staging
        silent.set()
        await updates.stage(good)
    assert copy.staged is not None


class OneTensor(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.a.copy_(tensor)


async def test_a_rank_that_can_make_no_more_groups_is_poisoned_for_the_engine_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("protocol.device.bounded_init.GRACE_S", 0.0)
    model = OneTensor()
    share = RankStaging(
        trace(model.load_weights, model.named_parameters(), {"a": (4,)}, torch.float32),
        architecture="",
        tied=False,
    )

    async def ask(method: str, *arguments: Any) -> list[Any]:
        if method == "stage":
            return [share.stage(msgspec.msgpack.decode(arguments[0], type=WeightManifest), arguments[1])]
        return [getattr(share, method)()]

    with closing(NcclSender(WeightConfig(transport="nccl", backend="gloo", timeout_s=20))) as sender:
        manifest = sender.publish("e1", 1, OLD.items())
        with stuck(Library(), MAX_STUCK):
            with pytest.raises(PoisonedError, match="this process has to be started again"):
                await AllRanksStaging(ask, ask, stage_timeout_s=20, call_timeout_s=20).stage(manifest)
            with pytest.raises(
                WeightError, match="version 2: 4 threads are stuck"
            ):  # nor does a trainer go on
                sender.publish("e1", 2, NEW.items())
        assert share.live_digest()[1] != manifest.digest

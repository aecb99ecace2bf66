"""Tests staging on all ranks: cancellation, and a rank that cannot stage any more."""

import asyncio
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from protocol.device.bounded_init import MAX_STUCK
from protocol.errors import PoisonedError, WeightError
from protocol.messages import WeightManifest
from rollout.engines.base import Served
from rollout.engines.contract.models import write_shm
from rollout.staging.places import StagingRoom
from rollout.staging.rank import RankStaging
from rollout.staging.rank_status import RankState, RankStatus
from rollout.staging.ranks import AllRanksStaging
from rollout.staging.staging_plan import trace
from tests.protocol.device.stuck import Library, stuck
from tests.rollout.staging.models import NEW, OLD, OneTensor, staging
from tests.trainer.weights.senders import part_sender
from trainer.config import WeightConfig


def plain(answers: list[Any]) -> list[Any]:
    """Return answers as they arrive from the ranks' processes."""
    arrived: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(answers))
    return arrived


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"covered": 15}, "rank 1 has staged covered 15, version 1 has 16"),
        ({"staged": Served("e1", 2, 7)}, "rank 1 has staged version 2, version 1 has 1"),
        ({"state": RankState.IDLE, "staged": None}, "rank 1 is idle"),
        ({"state": RankState.FAILED, "staged": None, "error": "no room"}, r"^no room$"),
    ],
)
async def test_rank_with_another_status_fails_the_version(
    tmp_path: Path, changed: dict[str, Any], says: str
) -> None:
    good = write_shm(tmp_path / "v1", OLD, 1)
    staged = RankStatus(RankState.STAGED, covered=16, staged=Served(good.epoch, 1, good.digest))
    answers: dict[str, list[Any]] = {
        "stage": ["", ""],
        "status": [staged, replace(staged, **changed)],
        "cancel": [RankStatus(RankState.IDLE)] * 2,
    }

    async def ask(method: str, *arguments: Any) -> list[Any]:
        return plain(answers[method])

    updates = AllRanksStaging(ask, ask, stage_timeout_s=20, call_timeout_s=20)
    with pytest.raises(WeightError, match=says):
        await updates.stage(good)
    answers["stage"] = ["", "another version is being staged"]
    with pytest.raises(WeightError, match=r"^another version is being staged$"):
        await updates.stage(good)


async def test_staging_cancelled_twice_leaves_ranks_that_can_stage_again(tmp_path: Path) -> None:
    good = write_shm(tmp_path / "v1", OLD, 1)
    copy = staging()
    staged = RankStatus(RankState.STAGED, covered=16, staged=Served(good.epoch, 1, good.digest))
    silent, asked = asyncio.Event(), asyncio.Event()

    async def ask(method: str, *arguments: Any) -> list[Any]:
        if not silent.is_set():
            asked.set()
            await silent.wait()
        if method == "stage":
            copy.fetch(good, 10)
            return [""]
        return plain([staged])

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


CONFIG = WeightConfig(transport="nccl", backend="gloo", timeout_s=20)


async def test_rank_that_can_make_no_more_groups_is_poisoned_for_the_engine_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("protocol.device.bounded_init.GRACE_S", 0.0)
    model = OneTensor()
    share = RankStaging(
        trace(model.load_weights, model.named_parameters(), {"a": (4,)}, torch.float32, StagingRoom()),
        architecture="",
        tied=False,
    )

    async def ask(method: str, *arguments: Any) -> list[Any]:
        if method == "stage":
            return [share.stage(msgspec.msgpack.decode(arguments[0], type=WeightManifest), arguments[1])]
        return plain([getattr(share, method)()])

    with closing(part_sender(CONFIG, OLD.items())) as sender:
        manifest = sender.publish("e1", 1, OLD.items())
        with stuck(Library(), MAX_STUCK):
            with pytest.raises(PoisonedError, match="this process must be restarted"):
                await AllRanksStaging(ask, ask, stage_timeout_s=20, call_timeout_s=20).stage(manifest)
            with pytest.raises(
                WeightError, match="version 2: rank 0: 4 threads are stuck"
            ):  # nor does a trainer go on
                sender.publish("e1", 2, NEW.items())
        assert share.live_digest()[1] != manifest.digest


class OneOf(torch.nn.Module):
    """A rank's share of a model: one of its tensors, as of experts that ranks have apart."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.own = name, torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == self.name:
                self.own.copy_(tensor)


async def test_tensors_of_other_ranks_are_accepted_and_those_of_no_rank_refused(tmp_path: Path) -> None:
    models = [OneOf("a"), OneOf("b")]
    shapes = {name: (4,) for name in ("a", "b", "c")}
    ranks = [
        RankStaging(
            trace(model.load_weights, model.named_parameters(), shapes, torch.float32, StagingRoom()),
            architecture="",
            tied=False,
        )
        for model in models
    ]

    async def ask(method: str, *arguments: Any) -> list[Any]:
        if method in ("stage", "commit"):
            arguments = msgspec.msgpack.decode(arguments[0], type=WeightManifest), *arguments[1:]
        return plain([getattr(rank, method)(*arguments) for rank in ranks])

    updates = AllRanksStaging(ask, ask, stage_timeout_s=20, call_timeout_s=20)
    tensors = {"a": torch.ones(4), "b": torch.full((4,), 2.0)}
    good = write_shm(tmp_path / "v1", tensors, 1)
    with pytest.raises(WeightError, match=r"the engine has no parameter for tensor [ab]$"):
        await updates.stage(good)
    await updates.divide([rank.unplaced for rank in ranks])
    with pytest.raises(WeightError, match="the engine has no parameter for tensor c"):
        await updates.stage(write_shm(tmp_path / "v2", {**tensors, "c": torch.ones(4)}, 1))
    await updates.stage(good)
    await updates.commit(good)
    assert [model.own.tolist() for model in models] == [[1.0] * 4, [2.0] * 4]
    assert await updates.live_digest() != good.digest  # no rank has all of it

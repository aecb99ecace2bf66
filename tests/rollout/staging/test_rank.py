"""Tests one rank's staging: release of its memory, and digests of the live weights."""

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from rollout.engines.contract.models import write_shm
from rollout.staging.places import StagingRoom
from rollout.staging.rank import RankStaging
from rollout.staging.rank_status import RankCommit, RankState
from rollout.staging.releasable_memory import ReleasableMemory
from rollout.staging.staging_plan import trace
from tests.rollout.staging.models import SHAPES, Fused, traced


def test_sleep_releases_the_buffer_and_wake_restores_its_padding(tmp_path: Path) -> None:
    model = Fused()
    with torch.no_grad():
        model.embed[5:] = 7.0
    plan = traced(model)
    share = RankStaging(plan, architecture="", tied=False)
    assert share.sleep() == share.sleep() == ""
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in plan.buffer.values())
    new = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    manifest = write_shm(tmp_path / "v1", new, 1)
    assert "sleeps" in share.stage(manifest, 10)
    assert share.commit(manifest) == RankCommit(False, "the rank is asleep")
    assert share.wake() == share.wake() == ""
    assert share.stage(manifest, 10) == ""
    end = time.monotonic() + 10
    while share.status().state == RankState.STAGING and time.monotonic() < end:
        time.sleep(0.001)
    assert share.commit(manifest).applied
    assert torch.equal(model.qk, torch.cat([new["q"], new["k"]]))
    assert torch.equal(model.embed[5:], torch.full((3, 4), 7.0))


def test_weights_can_be_released_after_their_digest_was_computed() -> None:
    live = torch.zeros(2, 3)

    def load(named: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in named:
            live.copy_(tensor[2:])

    plan = trace(load, [("w", live)], {"w": (4, 3)}, torch.float32, StagingRoom())
    share = RankStaging(plan, architecture="", tied=False)
    whole, before = share.live_digest()
    live.fill_(1)
    assert not whole
    assert share.live_digest()[1] != before
    ReleasableMemory([live]).release()
    assert not live.untyped_storage().nbytes()

"""Tests weights committed from the trainer's masters: tracing, commits and refusals."""

import time
from pathlib import Path

import pytest
import torch

from protocol.device.shared_layout import BUFFERS, PARAMETERS
from protocol.device.shared_tensors import map_tensors
from protocol.errors import EngineError, WeightError
from protocol.messages import WeightManifest
from rollout.engines.contract.models import write_shared, write_shm
from rollout.staging.loader_trace import record
from rollout.staging.rank import RankStaging
from rollout.staging.rank_status import RankState, RankStatus
from rollout.staging.shared_weights import SharedPlan, SharedStaging, describe, share_parameters
from rollout.staging.staging import digest_of, whole_source
from tests.rollout.staging.models import SHAPES, Fused


def planned(
    model: torch.nn.Module, shapes: dict[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> SharedPlan:
    load = model.load_weights
    return SharedPlan(*record(load, model.named_parameters(remove_duplicate=False), shapes, dtype))  # type: ignore[arg-type]


def new_weights() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def staged(share: RankStaging, manifest: WeightManifest) -> RankStatus:
    """Stage, and what the share then says of itself."""
    assert share.stage(manifest, 10) == ""
    end = time.monotonic() + 10
    while share.status().state == RankState.STAGING and time.monotonic() < end:
        time.sleep(0.001)
    return share.status()


def test_shared_parameters_are_mapped_by_checkpoint_name(tmp_path: Path) -> None:
    model = Fused()
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    room, buffers = share_parameters(model, {"angles": torch.arange(3.0)})
    plan = planned(model)
    plan.calibrate()
    assert model.head is model.embed
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())
    describe(room, tmp_path / "e.msgpack", plan.views(), buffers)
    found = map_tensors(tmp_path / "e.msgpack")
    assert {name: tuple(tensor.shape) for name, tensor in found[PARAMETERS].items()} == SHAPES
    assert torch.equal(found[PARAMETERS]["k"], before["qk"][4:])
    assert torch.equal(found[BUFFERS]["angles"], torch.arange(3.0))
    with torch.no_grad():
        model.qk[4:] = 3
    assert (found[PARAMETERS]["k"] == 3).all()
    room.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_commit_converts_masters_into_the_live_parameters(tmp_path: Path, dtype: torch.dtype) -> None:
    model = Fused().to(dtype)
    with torch.no_grad():
        model.embed[5:] = 7
    share = RankStaging(planned(model, dtype=dtype), architecture="", tied=False)
    new = new_weights()
    manifest, _, room = write_shared(tmp_path / "v1.msgpack", new, 1, dtype=dtype)
    live = digest_of(dict(model.named_parameters()))
    assert staged(share, manifest).covered == sum(entry.nbytes for entry in manifest.tensors)
    assert digest_of(dict(model.named_parameters())) == live
    assert share.commit(manifest).applied
    assert torch.equal(model.qk, torch.cat([new["q"], new["k"]]).to(dtype))
    assert torch.equal(model.embed, torch.cat([new["embed"], torch.full((3, 4), 7.0)]).to(dtype))
    assert share.live_digest() == (True, manifest.digest)
    assert not share.commit(manifest).applied
    room.close()


def test_invalidated_version_is_refused_before_the_copy_and_poisons_after_it(tmp_path: Path) -> None:
    model = Fused()
    share = RankStaging(planned(model), architecture="", tied=False)
    manifest, _, room = write_shared(tmp_path / "v1.msgpack", new_weights(), 1)
    held = room.tensors[0]
    assert staged(share, manifest).state == RankState.STAGED
    before = digest_of(dict(model.named_parameters()))
    held.fill_(-1)
    refused = share.commit(manifest)
    assert (refused.applied, refused.poisoned) == (False, False)
    assert "has been overwritten by the trainer" in refused.error
    assert digest_of(dict(model.named_parameters())) == before

    held.fill_(1)
    assert staged(share, manifest).state == RankState.STAGED
    staging = share._staging
    assert isinstance(staging, SharedStaging)
    staging._live["embed"] = WithdrawnMeanwhile(staging._live["embed"], held)  # type: ignore[assignment]
    broken = share.commit(manifest)
    assert (broken.applied, broken.poisoned) == (False, True)
    assert share.commit(manifest).poisoned
    room.close()


class WithdrawnMeanwhile:
    """A live tensor during whose copy the trainer invalidates its masters."""

    def __init__(self, live: torch.Tensor, held: torch.Tensor) -> None:
        self._live, self._held, self.shape = live, held, live.shape

    def copy_(self, master: torch.Tensor) -> None:
        self._held.fill_(-1)
        self._live.copy_(master)


def test_tensor_in_several_parts_cannot_be_shared() -> None:
    class Halves(Fused):
        def load_weights(self, named: object) -> None:
            for name, tensor in named:  # type: ignore[attr-defined]
                if name == "qk":
                    self.qk.data[:2].copy_(tensor[:2])
                    self.qk.data[2:].copy_(tensor[2:])
                else:
                    self.embed.data.copy_(tensor)

    with pytest.raises(
        EngineError, match=r"tensor qk is not one dense part of a parameter: weights\.transport"
    ):
        planned(Halves(), {"qk": (6, 4), "embed": (8, 4)})


def test_loader_that_writes_one_place_twice_fails_calibration() -> None:
    class Twice(Fused):
        def load_weights(self, named: object) -> None:
            for name, tensor in named:  # type: ignore[attr-defined]
                if name == "embed":
                    self.embed.data[:5].copy_(tensor)
                    self.embed.data[5:].fill_(0)
                else:
                    self.qk.data.narrow(0, 0, tensor.shape[0]).copy_(tensor)

    with pytest.raises(EngineError, match="parameter qk: staging the live weights does not reproduce them"):
        planned(Twice()).calibrate()


def test_sharing_engine_accepts_no_other_transport(tmp_path: Path) -> None:
    staging = SharedStaging({name: whole_source(tensor) for name, tensor in new_weights().items()})
    with pytest.raises(WeightError, match="comes by shm, this engine accepts only the transport shared"):
        staging.fetch(write_shm(tmp_path / "v1", new_weights(), 1), 10)

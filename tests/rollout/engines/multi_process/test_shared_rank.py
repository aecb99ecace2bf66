"""Tests how a rank of the engine takes versions out of the masters of the same rank of the trainer."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch

from protocol.errors import WeightError
from protocol.messages import WeightManifest, WeightPiece
from rollout.engines.multi_process.shared_rank import (
    LiveSlice,
    SharedRankPlan,
    SharedRankStaging,
    traced_slices,
)
from rollout.staging.loader_trace import LoaderTrace, record
from rollout.staging.staging import digest_of
from tests.trainer.megatron.models import save_model
from trainer.config import ParallelConfig
from trainer.megatron.convert.parts import slices_of
from trainer.megatron.families.stages import export_plan
from trainer.megatron.inference.model import CachedModel
from trainer.megatron.layout import Layout
from trainer.ranks.publication import Publication
from trainer.weights.bucket_writer import in_dtype
from trainer.weights.part_layout import blank_manifest
from trainer.weights.shared_parts import SharedPartSender


@dataclass
class Rank:
    """The only rank of trainer and engine, in one process."""

    model: CachedModel
    masters: dict[str, torch.Tensor]
    plan: SharedRankPlan
    staging: SharedRankStaging
    sender: SharedPartSender = field(init=False)

    def publish(self, version: int) -> WeightManifest:
        named = ((name, part.reshape(self.model.shapes[name])) for name, part in self.parts().items())
        return self.sender.publish("e1", version, in_dtype(named, "bfloat16"))

    def parts(self) -> dict[str, torch.Tensor]:
        plans = export_plan(
            self.model.architecture, Layout.of(ParallelConfig(), self.model.architecture.layers)
        )
        return {name: part for name, (_, part) in slices_of(plans, self.masters).items()}

    def live(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.parameters.items()}


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    model_dir = save_model("qwen2", tmp_path / "model")
    model = CachedModel(model_dir, dtype="bfloat16", running=1, length=16)
    generator = torch.Generator().manual_seed(0)
    masters = {
        name: torch.nn.Parameter(torch.randn(tensor.shape, generator=generator), requires_grad=False)
        for name, tensor in model.parameters.items()
    }
    slices = {name: LiveSlice(model.shapes[name], *part) for name, part in model.slices().items()}
    pieces = tuple(WeightPiece(number, part.box) for number, part in enumerate(slices.values()))
    publication = Publication(tuple(model.shapes), tuple(model.shapes.values()), (pieces,))
    plan = SharedRankPlan(slices, 0)
    made = Rank(model, masters, plan, plan.staging(architecture="", tied=False))
    blank = blank_manifest(publication, "bfloat16", 1 << 20, "shared")
    made.sender = SharedPartSender(tmp_path, 0, blank, masters, made.parts)
    yield made
    made.sender.close()
    model.close()


def is_live(rank: Rank) -> bool:
    live = rank.live()
    return all(torch.equal(live[name], master.bfloat16()) for name, master in rank.masters.items())


def test_a_version_is_converted_from_the_masters_and_has_the_digest_that_was_published(rank: Rank) -> None:
    manifest = rank.publish(3)
    before = rank.live()
    rank.staging.fetch(manifest, 30.0)
    assert all(torch.equal(rank.live()[name], tensor) for name, tensor in before.items())
    rank.staging.take(manifest)
    rank.plan.apply()
    assert is_live(rank)
    assert rank.staging.staged is None
    found = {name: tensor for name, tensor, complete in rank.plan.gathered() if complete}
    assert {name: tensor.shape for name, tensor in found.items()} == rank.model.shapes
    assert digest_of(found) == manifest.digest


def test_masters_that_changed_after_they_were_published_are_refused_by_name(rank: Rank) -> None:
    manifest, before = rank.publish(3), rank.live()
    name = next(name for name in rank.masters if "linear_proj" in name)
    rank.masters[name].view(-1)[0] += 1
    with pytest.raises(WeightError, match=r"tensor model\.layers\.0\.self_attn\.o_proj\.weight: rank 0"):
        rank.staging.fetch(manifest, 30.0)
    assert rank.staging.staged is None
    assert all(torch.equal(rank.live()[name], tensor) for name, tensor in before.items())


def test_sums_that_are_not_those_of_the_manifest_are_refused_by_name(rank: Rank) -> None:
    manifest = rank.publish(3)
    entry = manifest.tensors[2]
    changed = [*manifest.tensors]
    changed[2] = msgspec.structs.replace(entry, digest=entry.digest ^ 1)
    with pytest.raises(WeightError):
        rank.staging.fetch(msgspec.structs.replace(manifest, tensors=tuple(changed)), 30.0)
    assert rank.staging.staged is None


def test_a_version_whose_masters_are_written_to_is_not_committed(rank: Rank) -> None:
    manifest, before = rank.publish(3), rank.live()
    rank.staging.fetch(manifest, 30.0)
    rank.sender.invalidate()
    with pytest.raises(WeightError, match="version 3 has been overwritten by the trainer"):
        rank.staging.take(manifest)
    with pytest.raises(WeightError, match="version 3 has been overwritten by the trainer"):
        rank.staging.fetch(manifest, 30.0)
    assert all(torch.equal(rank.live()[name], tensor) for name, tensor in before.items())


def test_a_trainer_that_divides_the_model_in_another_way_is_refused(rank: Rank) -> None:
    manifest = rank.publish(3)
    part = manifest.parts[0]
    first, *others = part.pieces
    (start, end), columns = first.box
    halves = [
        msgspec.structs.replace(first, box=(rows, columns)) for rows in ((start, end // 2), (end // 2, end))
    ]
    divided = msgspec.structs.replace(part, pieces=(*halves, *others))
    with pytest.raises(WeightError, match=r"embed_tokens\.weight: no rank of the trainer holds exactly"):
        rank.staging.fetch(msgspec.structs.replace(manifest, parts=(divided,)), 30.0)
    second = SharedRankPlan(rank.plan._slices, 1).staging(architecture="", tied=False)
    with pytest.raises(WeightError, match="version 3 is of 1 ranks, and this is rank 1 of the engine"):
        second.fetch(manifest, 30.0)


def test_a_part_that_lies_in_other_turns_is_refused_by_name(rank: Rank) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    part = rank.plan._slices[name]
    dense = dataclasses.replace(part, live=part.live.reshape(part.shape))
    other = SharedRankPlan({**rank.plan._slices, name: dense}, 0).staging(architecture="", tied=False)
    with pytest.raises(WeightError, match=r"q_proj\.weight is \[128, 64\] in rank 0 of the engine, \[2, 64"):
        other.fetch(rank.publish(3), 30.0)


class HalfOfTwo(torch.nn.Module):
    """The second rank's part of a fused layer, of a layer that is divided by columns, and of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(4, 3))
        self.out = torch.nn.Parameter(torch.zeros(3, 2))
        self.norm = torch.nn.Parameter(torch.zeros(3))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        targets = {
            "q": lambda t: self.qk[:2].copy_(t.narrow(0, 2, 2)),
            "k": lambda t: self.qk[2:].copy_(t.narrow(0, 2, 2)),
            "out": lambda t: self.out.copy_(t.narrow(1, 2, 2)),
            "norm": lambda t: self.norm.copy_(t),
        }
        for name, tensor in weights:
            targets[name](tensor)


def test_slices_are_where_a_loader_puts_a_ranks_parts() -> None:
    shapes = {"q": (4, 3), "k": (4, 3), "out": (3, 4), "norm": (3,)}
    model = HalfOfTwo()
    traced = LoaderTrace(*record(model.load_weights, model.named_parameters(), shapes, torch.float32))
    found = traced_slices(traced, shapes)
    assert {name: part.box for name, part in found.items()} == {
        "q": ((2, 4), (0, 3)),
        "k": ((2, 4), (0, 3)),
        "out": ((0, 3), (2, 4)),
        "norm": ((0, 3),),
    }
    assert found["k"].live.data_ptr() == model.qk[2:].data_ptr()
    plan = SharedRankPlan(found, 1)
    with torch.no_grad():
        model.qk[2:] = 5
    gathered = {name: (tensor, whole) for name, tensor, whole in plan.gathered()}
    assert gathered["k"][0].sum(1).tolist() == [0, 0, 15, 15]
    assert {name: whole for name, (_, whole) in gathered.items()} == {
        "q": False,
        "k": False,
        "out": False,
        "norm": True,
    }

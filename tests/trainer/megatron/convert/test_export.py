"""Pieces of a version, from any layout of the trainer to any of an engine, executed on numbers."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray

from protocol.messages import WeightManifest, WeightPiece
from protocol.weights.boxes import Box, covers, relative, shape_of, size_of, whole
from protocol.weights.slices import BucketSizes, check_parts, senders_of, transfer_of
from trainer.megatron.convert.export import PublishedPiece, published_pieces
from trainer.megatron.convert.reshard import TensorPlan, narrow_rows, plan_of
from trainer.megatron.convert.rules import (
    Direct,
    FusedQKV,
    GatedMLP,
    Rule,
    Segment,
    Split,
    Stacked,
    Vocabulary,
)
from trainer.megatron.layout import Grid, Layout
from trainer.ranks.publication import Publication
from trainer.weights.part_layout import blank_manifest

EXPERTS = 4
WIDTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(Rule):
    """One tensor of a checkpoint that is a stack of experts, some on each rank."""

    name: str

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.name: (EXPERTS, 6, WIDTH)}

    def segments(self, grid: Grid) -> tuple[Segment, ...]:
        here, rows = EXPERTS // grid.ep, 6 // grid.tp
        return tuple(
            Segment(self.name, tp * rows, tp + grid.tp * (expert // here), 0, rows, expert % here, expert)
            for expert in range(EXPERTS)
            for tp in range(grid.tp)
        )


def rules_of(stage: int, stages: int) -> list[Rule]:
    """A layer for each kind of rule, the embedding on the first stage and the head on the last."""
    p = f"layers.{stage}."
    qkv = FusedQKV(
        parameter=p + "qkv",
        names=(p + "q", p + "k", p + "v"),
        groups=4,
        queries=2,
        head_dim=3,
        columns=(WIDTH,),
    )
    gated = GatedMLP(parameter=p + "fc1", names=(p + "gate", p + "up"), shape=(12, WIDTH))
    found: list[Rule] = [
        Direct(parameter=p + "norm", name=p + "norm", shape=(WIDTH,)),
        qkv,
        gated,
        Stacked(parameter=p + "fc3", name=p + "gate_up", rule=gated),
        Split(parameter=p + "o", name=p + "o", shape=(WIDTH, 24), dim=1),
        Experts(parameter=p + "experts", name=p + "experts", expert=True),
    ]
    if stage == 0:
        found.append(Vocabulary(parameter="embed", name="embed", shape=(13, WIDTH)))
    if stage == stages - 1:
        found.append(Vocabulary(parameter="head", name="head", shape=(13, WIDTH)))
    return found


LAYOUTS = st.builds(
    lambda tp, cp, dp, experts, pp: Layout(
        tp, cp, dp, *experts, stages=tuple((range(stage, stage + 1),) for stage in range(pp))
    ),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2)),
    st.sampled_from((1, 2)),
    st.just((1, 1)),
    st.integers(1, 3),
) | st.builds(
    lambda experts, pp: Layout(
        2, 1, 4, *experts, stages=tuple((range(stage, stage + 1),) for stage in range(pp))
    ),
    st.sampled_from(((2, 1), (4, 1), (4, 2), (2, 2), (1, 2))),
    st.integers(1, 2),
)


def plans_of(layout: Layout) -> tuple[TensorPlan, ...]:
    return plan_of([(stage, rules_of(stage, layout.pp)) for stage in range(layout.pp)], layout)


def numbered(plans: tuple[TensorPlan, ...]) -> dict[str, NDArray[np.int64]]:
    """Tensors of which every element is another number."""
    found, start = {}, 0
    for plan in plans:
        count = size_of(whole(plan.shape))
        found[plan.name] = np.arange(start, start + count).reshape(plan.shape)
        start += count
    return found


def loaded(layout: Layout, rank: int, source: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
    """A rank's parameters, filled by the rules from left to right."""
    place = layout.place_of(rank)
    held = {}
    for rule in rules_of(place.pp, layout.pp):
        grid = layout.grid(expert=rule.expert)
        number = layout.number_of(place, expert=rule.expert)
        segments = [s for s in rule.segments(grid) if s.rank == number]
        shape = (EXPERTS // grid.ep, 6 // grid.tp, WIDTH) if rule.expert else rule.local_shape(grid)
        held[rule.parameter] = np.full(shape, -1)
        for s in segments:
            target = stretched(held[rule.parameter], rule.dim, s.local_start, s.length, s.local_matrix)
            target[...] = stretched(source[s.name], rule.dim, s.start, s.length, s.matrix)
    return held


def stretched(
    array: NDArray[np.int64], dim: int, start: int, length: int, matrix: int | None
) -> NDArray[np.int64]:
    part = array if matrix is None else array[matrix]
    return part[(slice(None),) * dim + (slice(start, start + length),)]


def published(
    plan: TensorPlan, piece: PublishedPiece, held: dict[str, NDArray[np.int64]]
) -> NDArray[np.int64]:
    rows = [
        stretched(held[plan.parameter], plan.dim, row.local_start, row.length, row.local_matrix)
        for row in piece.rows
    ]
    return np.concatenate(rows, plan.dim).reshape(shape_of(piece.box))


def engine_boxes(plans: tuple[TensorPlan, ...], tp: int, ep: int, rank: int) -> dict[str, tuple[Box, ...]]:
    """What a rank of an engine wants: its rows, with a padded vocabulary, its columns, or its experts."""
    wanted: dict[str, tuple[Box, ...]] = {}
    for plan in plans:
        box = list(whole(plan.shape))
        if plan.expert:
            box[0] = (rank % ep * EXPERTS // ep, (rank % ep + 1) * EXPERTS // ep)
        elif "norm" not in plan.name:
            cut = -(-plan.shape[plan.dim] // tp)
            box[plan.dim] = (
                min(rank * cut, plan.shape[plan.dim]),
                min((rank + 1) * cut, plan.shape[plan.dim]),
            )
        if plan.name.endswith("gate_up") and tp > 1:  # fused: its rows of both halves
            half, cut = plan.shape[0] // 2, plan.shape[0] // 2 // tp
            wanted[plan.name] = tuple(
                ((start + rank * cut, start + (rank + 1) * cut), (0, WIDTH)) for start in (0, half)
            )
        elif size_of(tuple(box)):
            wanted[plan.name] = (tuple(box),)
    return wanted


def manifest_of(
    plans: tuple[TensorPlan, ...], parts: tuple[tuple[PublishedPiece, ...], ...]
) -> WeightManifest:
    pieces = tuple(tuple(WeightPiece(piece.tensor, piece.box) for piece in part) for part in parts)
    publication = Publication(tuple(plan.name for plan in plans), tuple(plan.shape for plan in plans), pieces)
    return replace(blank_manifest(publication, "float32", 1 << 20), version=1)


SIZES = st.sampled_from((BucketSizes(32, 32), BucketSizes(1000, 100), BucketSizes(1 << 20, 1 << 20)))


@settings(deadline=None, max_examples=60)
@given(LAYOUTS, st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 4)), SIZES)
def test_engine_ranks_get_the_slices_of_the_checkpoint_and_each_element_once(
    layout: Layout, tp: int, ep: int, sizes: BucketSizes
) -> None:
    plans = plans_of(layout)
    source = numbered(plans)
    parts = published_pieces(plans, layout)
    manifest = manifest_of(plans, parts)
    check_parts(manifest)
    held = [loaded(layout, rank, source) for rank in range(layout.ranks)]
    for rank in range(max(tp, ep)):
        wanted = engine_boxes(plans, tp, ep, rank)
        got = {name: np.full(array.shape, -1) for name, array in source.items()}
        times = {name: np.zeros(array.shape, int) for name, array in source.items()}
        senders = senders_of(manifest, wanted)
        for part in range(layout.ranks):
            transfer = transfer_of(manifest, part, wanted, sizes)
            assert part in senders or not transfer.buckets
            for cut in (cut for bucket in transfer.buckets for cut in bucket):
                piece, plan = parts[part][cut.piece], plans[cut.tensor]
                values = published(plan, piece, held[part])[relative(cut.box, piece.box)]
                place = tuple(slice(*side) for side in cut.box)
                got[plan.name][place] = values
                times[plan.name][place] += 1
            for bucket in transfer.buckets:
                assert len(bucket) == 1 or transfer.nbytes(bucket) <= sizes.bucket_bytes
                assert len(bucket) == 1 or all(cut.nbytes < sizes.alone_bytes for cut in bucket)
        for name, array in source.items():
            want = np.zeros(array.shape, bool)
            for box in wanted.get(name, ()):
                want[tuple(slice(*side) for side in box)] = True
            assert np.array_equal(times[name], want.astype(int)), name
            assert np.array_equal(got[name], np.where(want, array, -1)), name


@given(LAYOUTS)
def test_pieces_cover_every_tensor_and_are_what_their_rank_holds(layout: Layout) -> None:
    plans = plans_of(layout)
    source = numbered(plans)
    parts = published_pieces(plans, layout)
    for index, plan in enumerate(plans):
        boxes = [piece.box for part in parts for piece in part if piece.tensor == index]
        assert covers(plan.shape, tuple(sorted(boxes)))
    for rank, part in enumerate(parts):
        held = loaded(layout, rank, source)
        for piece in part:
            plan = plans[piece.tensor]
            expected = source[plan.name][tuple(slice(*side) for side in piece.box)]
            assert np.array_equal(published(plan, piece, held), expected)


@pytest.mark.parametrize("dp", [2, 4])
def test_copies_of_a_model_share_the_bytes(dp: int) -> None:
    layout = Layout(2, 1, dp, stages=((range(0, 1),), (range(1, 2),)))
    parts = published_pieces(plans_of(layout), layout)
    sizes = [sum(size_of(piece.box) for piece in part) for part in parts]
    largest = max(
        sum(size_of(piece.box) for piece in part if piece.tensor == tensor)
        for part in parts
        for tensor in {piece.tensor for piece in part}
    )
    for stage in (sizes[: 2 * dp], sizes[2 * dp :]):
        assert max(stage) - min(stage) <= largest


def test_stretches_of_arrays_are_those_of_tensors() -> None:
    import torch

    array = np.arange(120).reshape(4, 5, 6)
    for dim, matrix in ((0, None), (1, None), (0, 2), (1, 3)):
        expected = narrow_rows(torch.from_numpy(array), dim, 1, 3, matrix).numpy()
        assert np.array_equal(stretched(array, dim, 1, 3, matrix), expected)

"""Tests that micro-batches hold every token that is asked for once, within the budget."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.megatron.models import make_batch
from tests.trainer.megatron.trees import make_tree
from trainer.batch import Batch
from trainer.config import ParallelConfig
from trainer.data.packing import balance
from trainer.data.prefix_tree import PrefixTree, RowFamily, batch_families, single_row_families
from trainer.layers.attention.terms import PLAIN
from trainer.layers.limits import KeyCopies
from trainer.megatron.layers.attention.rotary import Rotary, packed_sequences
from trainer.megatron.layout import Place
from trainer.megatron.micro_batches import MicroBatch, Packing
from trainer.megatron.parallel import Position

ROTARY = Rotary(torch.ones(4))


def position(
    tp: int = 1, dp: int = 1, pp: int = 1, vpp: int = 1, *, cp: int = 1, cp_rank: int = 0
) -> Position:
    config = ParallelConfig(tp, pp, dp, vpp, context_parallel_size=cp, sequence_parallel=tp > 1)
    return Position(config, torch.device("cpu"), Place(cp=cp_rank))


def apart(lengths: torch.Tensor) -> list[RowFamily]:
    """Samples that share no tokens."""
    return single_row_families((lengths - 1).tolist())


def micro_batches(batch: Batch, packing: Packing, place: Position, *, trained: bool) -> list[MicroBatch]:
    return list(packing.micro_batches(batch, place, [ROTARY], torch.float32, [PLAIN], trained=trained))


def families_of(batch: Batch, *, shared: bool) -> list[RowFamily]:
    return batch_families(batch) if shared else apart(batch.lengths)


@settings(deadline=None, max_examples=30)
@given(
    tp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2, 5, 16]),
    budget=st.integers(1, 60),
    most=st.integers(1, 8),
    trained=st.booleans(),
    shared=st.booleans(),
)
def test_every_wanted_token_is_in_one_micro_batch_of_one_replica(
    tp: int, dp: int, budget: int, most: int, trained: bool, shared: bool
) -> None:
    batch, place = make_tree("qwen2", 3), position(tp, dp)
    mask = batch.loss_mask if trained else batch.sampled_mask
    seen = torch.zeros(len(batch.tokens), dtype=torch.int64)
    for piece in balance(batch.lengths.tolist(), dp):
        samples = torch.tensor(piece, dtype=torch.int64)
        part = batch.select(samples)
        origin = torch.isin(batch.sample_index, samples).nonzero()[:, 0]
        families = families_of(part, shared=shared)
        packing = Packing.of(families, place, budget, most)
        found = micro_batches(part, packing, place, trained=trained)
        assert [micro.inputs.size(1) for micro in found] == list(packing.sizes)
        for micro, chosen, tree in zip(found, packing.samples, packing.trees, strict=True):
            check(part, micro, chosen, tree, place)
            assert len(chosen) <= most
            assert len(chosen) <= 1 or sum(tree.lengths) <= budget
            seen.index_add_(0, origin[micro.places], torch.ones_like(micro.places))
    assert torch.equal(seen, mask.long())


@settings(deadline=None, max_examples=20)
@given(
    tp=st.sampled_from([1, 2]),
    cp=st.sampled_from([2, 3, 8]),
    budget=st.integers(1, 60),
    trained=st.booleans(),
    shared=st.booleans(),
)
def test_every_wanted_token_is_on_one_context_rank(
    tp: int, cp: int, budget: int, trained: bool, shared: bool
) -> None:
    batch = make_tree("qwen2", 3)
    mask = batch.loss_mask if trained else batch.sampled_mask
    seen = torch.zeros(len(batch.tokens), dtype=torch.int64)
    packing = Packing.of(families_of(batch, shared=shared), position(tp, cp=cp), budget, 8)
    assert packing.tokens == cp * sum(packing.sizes)
    assert packing.padding == packing.tokens - sum(sum(tree.lengths) for tree in packing.trees)
    assert packing.row_tokens == int((batch.lengths - 1).sum())
    for rank in range(cp):
        found = micro_batches(batch, packing, position(tp, cp=cp, cp_rank=rank), trained=trained)
        assert [micro.inputs.size(1) for micro in found] == list(packing.sizes)
        for micro in found:
            rows = micro.rows[: micro.wanted]
            assert torch.equal(micro.inputs[0, rows], batch.tokens[micro.places - 1].long())
            assert torch.equal(micro.targets[: micro.wanted], batch.tokens[micro.places].long())
            assert len(micro.rows) == max(1, micro.wanted)
            if micro.trained is not None:
                assert torch.equal(micro.trained.behaviour_logprobs, batch.behaviour_logprobs[micro.places])
            seen.index_add_(0, micro.places, torch.ones_like(micro.places))
    assert torch.equal(seen, mask.long())


def check(
    part: Batch, micro: MicroBatch, samples: tuple[int, ...], tree: PrefixTree, place: Position
) -> None:
    """Inputs are the stretches of the tree; each asked-for token follows its row."""
    starts = [int(part.offsets[samples[stretch.row]]) for stretch in tree.stretches]
    tokens = [
        part.tokens[start + stretch.start : start + stretch.stop]
        for start, stretch in zip(starts, tree.stretches, strict=True)
    ]
    real = sum(map(len, tokens))
    assert torch.equal(micro.inputs[0, :real], torch.cat([*tokens, part.tokens[:0]]).long())
    assert micro.inputs.size(1) % place.config.tensor_model_parallel_size == 0
    assert micro.inputs.size(1) - real < max(2, place.config.tensor_model_parallel_size + 1)
    assert len(micro.rows) == len(micro.targets) == max(1, micro.wanted)
    rows = micro.rows[: micro.wanted]
    assert torch.equal(micro.inputs[0, rows], part.tokens[micro.places - 1].long())
    assert torch.equal(micro.targets[: micro.wanted], part.tokens[micro.places].long())
    offsets = micro.sequences.offsets.tolist()
    assert offsets[-1] == micro.inputs.size(1)
    assert max(end - start for start, end in pairwise(offsets)) == micro.sequences.longest


def test_positions_begin_anew_in_every_sample() -> None:
    batch, place = make_batch("qwen2", 0), position()
    (micro,) = micro_batches(batch, Packing.of(apart(batch.lengths), place, 8192, 100), place, trained=True)
    positions = torch.cat([torch.arange(end - start) for start, end in pairwise(micro.sequences.offsets)])
    torch.testing.assert_close(micro.sequences.angles[0].cos[:, 0, 0], positions.float().cos())


def test_longrope_goes_by_the_sample_and_not_by_its_inputs() -> None:
    rotary = Rotary(torch.ones(4), 3 * torch.ones(4), original=5)
    sequences = packed_sequences([4, 5], [rotary], torch.float32, segmented=False)  # samples of 5 and 6
    angles = torch.cat([torch.arange(4), 3 * torch.arange(5)])
    torch.testing.assert_close(sequences.angles[0].cos[:, 0, 0], angles.float().cos())


def test_a_sample_over_the_budget_is_alone() -> None:
    packing = Packing.of(apart(torch.tensor([3, 50, 4, 3])), position(), 10, 100)
    assert packing.samples == ((1,), (2, 0, 3))
    assert (packing.sizes, packing.padding) == ((49, 7), 0)


def test_sequence_parallel_padding_is_counted() -> None:
    packing = Packing.of(apart(torch.tensor([6, 6, 5])), position(tp=4), 10, 100)
    assert (packing.sizes, packing.padding) == ((12, 4), 2)


def test_context_ranks_share_a_budget_of_all_of_them() -> None:
    lengths = torch.full((64,), 101)
    packing = Packing.of(apart(lengths), position(tp=2, cp=4), 1000, 100)
    assert packing.sizes == (1000, 600)
    assert Packing.of(apart(lengths), position(pp=2, cp=4), 6400, 100).sizes == (200,) * 8


def test_a_pipeline_has_enough_micro_batches_to_fill_its_stages() -> None:
    lengths = torch.full((64,), 101)
    assert len(Packing.of(apart(lengths), position(), 6400, 100)) == 1
    assert len(Packing.of(apart(lengths), position(pp=2), 6400, 100)) == 8
    assert len(Packing.of(apart(lengths), position(pp=2), 500, 100)) == 13


def test_a_virtual_pipeline_has_groups_of_as_many_micro_batches_as_stages() -> None:
    lengths = torch.full((64,), 101)
    place = position(pp=4, vpp=2)
    assert len(Packing.of(apart(lengths), place, 500, 100)) == 16
    packing = Packing.of(apart(lengths[:3]), place, 6400, 100)
    assert (packing.samples, packing.sizes, packing.padding) == (
        ((0,), (1,), (2,), ()),
        (100, 100, 100, 1),
        1,
    )


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (2, 2)])
def test_a_replica_without_samples_takes_part_with_padding(tp: int, cp: int) -> None:
    batch, place = make_batch("qwen2", 0).select(torch.tensor([], dtype=torch.int64)), position(tp, cp=cp)
    packing = Packing.of(apart(batch.lengths), place, 8192, 100)
    (micro,) = micro_batches(batch, packing, place, trained=True)
    assert packing.padding == tp * cp
    assert (tuple(micro.inputs.shape), micro.wanted, len(micro.rows)) == ((1, tp), 0, 1)
    assert micro.trained is not None
    assert len(micro.trained.place) == 0


def test_copies_of_keys_before_stretches_take_room() -> None:
    prompt = RowFamily(tuple(range(8)), (110,) * 8, (0, *[100] * 7))
    assert (prompt.copies(0), prompt.copies(21)) == (800, 160)
    for copies, sizes in (
        (KeyCopies(0.02), (180,)),
        (KeyCopies(0.1), (140, 140)),
        (KeyCopies(0.1, window=21), (180,)),
    ):
        assert Packing.of([prompt], position(), 200, 100, copies=copies).sizes == sizes


def test_a_tree_whose_keys_are_not_copied_takes_its_tokens() -> None:
    tree = RowFamily(tuple(range(16)), (8703,) * 16, (0, *[8192] * 15))
    assert Packing.of([tree], position(), 16384, 100).sizes == (16368,)


def test_a_pipeline_cuts_a_tree_only_if_stages_would_wait_longer() -> None:
    prompt, response = (
        RowFamily(tuple(range(16)), (tokens,) * 16, (0, *[tokens - 10] * 15)) for tokens in (1000, 20)
    )
    assert len(Packing.of([prompt], position(pp=2), 6400, 100)) == 1
    assert len(Packing.of([response], position(pp=2), 6400, 100)) > 2


def test_tokens_of_a_prompt_are_counted_once_and_for_each_sample() -> None:
    prompt = RowFamily((0, 1, 2), (10, 12, 14), (0, 8, 8))
    packing = Packing.of([prompt], position(tp=4), 100, 100)
    assert (packing.tokens, packing.padding, packing.row_tokens) == (20, 0, 36)
    assert Packing.of([prompt], position(), 15, 100).samples == ((0, 1), (2,))

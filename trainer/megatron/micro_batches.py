"""Packs a replica's samples into micro-batches, and makes each one as it is needed.

With context parallelism a rank makes its part of it: every rank of a replica has the whole samples, so also
the token that follows the last one of a piece.

Shapes: T tokens of a micro-batch that are inputs on this rank, k of them predict a requested token.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from math import ceil
from typing import TypeVar

import torch

from trainer.batch import Batch, TrainedTokens, trained_tokens
from trainer.data.context_division import Division
from trainer.data.packing import fill_groups, pack_families
from trainer.data.prefix_tree import PrefixTree, RowFamily
from trainer.layers.attention.kernels import by_segments, kernel_for, key_uses
from trainer.layers.attention.terms import AttentionTerms
from trainer.layers.attention.visible import (
    ComputedTokens,
    pieces_with_padding,
    to_device,
    visible_keys,
)
from trainer.layers.limits import NO_COPIES, KeyCopies
from trainer.megatron.layers.attention.core import sum_over_context_ranks
from trainer.megatron.layers.attention.rotary import Rotary, RotarySequences, packed_sequences
from trainer.megatron.layers.experts.balance import RoutedTokens, routed_tokens
from trainer.megatron.parallel import Position

T = TypeVar("T", TrainedTokens, RoutedTokens)

PASSES_OF_A_STAGE = (4, 2, 1)
"""With a pipeline, micro-batches for each stage: stages wait for (stages - 1) of so many passes. The first
number is taken, unless so small ones compute too much of what samples share again."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples one after the other, each without its last token, which has no successor.

    What several of them begin with is there once. With context parallelism they are this rank's pieces.
    """

    inputs: torch.Tensor
    """int64 [1, T], on the device."""
    sequences: RotarySequences
    rows: torch.Tensor
    """int64 [max(k, 1)], on the device: the inputs that predict the tokens asked for. If there is none it is
    the first one: so a pass always has a row, and every parameter is in its graph."""
    targets: torch.Tensor
    """int64 [max(k, 1)], on the device: the tokens themselves."""
    wanted: int
    """k."""
    places: torch.Tensor
    """int64 [k], on the device: index of each token into the replica's tokens."""
    trained: TrainedTokens | None
    """On the device; None where no loss is computed."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The division of a replica's samples into micro-batches; it has at least one, which may be empty."""

    samples: tuple[tuple[int, ...], ...]
    """For each micro-batch the indices of its samples."""
    trees: tuple[PrefixTree, ...]
    """For each the stretches that hold their inputs; rows are numbered as in `samples`."""
    divisions: tuple[Division, ...]
    """How the stretches of each are divided between the context ranks."""
    row_tokens: int
    """Inputs of all samples, those that are computed once counted for each."""

    @classmethod
    def of(
        cls,
        families: Sequence[RowFamily],
        position: Position,
        micro_batch_tokens: int,
        micro_batch_size: int,
        *,
        copies: KeyCopies = NO_COPIES,
    ) -> "Packing":
        """Pack samples.

        A family that has more tokens than a micro-batch is cut. With sequence parallelism a micro-batch is
        padded to a multiple of the tensor ranks. With a pipeline there are several for each stage, if there
        are as many samples, so that the stages work at the same time. With context parallelism one has the
        tokens of all context ranks. A replica without samples takes part with one token a rank. A virtual
        pipeline takes micro-batches in groups of as many as there are stages: the fullest are divided, or
        empty ones added, to fill the last.

        Args:
            families: the samples, with the tokens that they share.
            position: a rank's place in the layout.
            micro_batch_tokens: tokens of a micro-batch on each rank, at most, unless one sample has more.
            micro_batch_size: samples of a micro-batch, at most.
            copies: keys and values before what samples do not share that take room of tokens.
        """
        ranks = position.config.context_parallel_size
        budget, stages = micro_batch_tokens * ranks, position.config.pipeline_model_parallel_size
        size = partial(_size, copies)
        pack_into = partial(pack_families, families, most=micro_batch_size, size=size)
        packed = pack_into(budget) if stages == 1 else _filling_stages(pack_into, families, budget, position)
        trees = tuple(map(PrefixTree.of, packed))
        return cls(
            tuple(tuple(row for family in one for row in family.rows) for one in packed),
            trees,
            tuple(Division.of(tree.lengths, ranks, _divisor(position)) for tree in trees),
            sum(sum(family.lengths) for family in families),
        )

    def __len__(self) -> int:
        return len(self.samples)

    def filled(self, passes: int, position: Position) -> "Packing":
        """Return it with empty micro-batches at the end, `passes` in all."""
        more = passes - len(self)
        empty = Division.of([], position.config.context_parallel_size, _divisor(position))
        return replace(
            self,
            samples=self.samples + ((),) * more,
            trees=self.trees + (PrefixTree((), ()),) * more,
            divisions=self.divisions + (empty,) * more,
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens that each computes on this rank, and on every other one."""
        return tuple(division.size for division in self.divisions)

    @property
    def tokens(self) -> int:
        """Tokens that all of them compute, on all context ranks."""
        return sum(division.size * len(division.pieces) for division in self.divisions)

    @property
    def padding(self) -> int:
        """Tokens in all of them that are no sample's, on all context ranks."""
        return sum(division.padding for division in self.divisions)

    def micro_batches(
        self,
        batch: Batch,
        position: Position,
        rotaries: Sequence[Rotary],
        dtype: torch.dtype,
        terms: Iterable[AttentionTerms],
        *,
        trained: bool,
        experts: bool = False,
        states: bool = False,
    ) -> Iterator[MicroBatch]:
        """Make them in order, each when it is asked for.

        Args:
            batch: the replica's part, on the host.
            position: this rank's place in the layout.
            rotaries: the model's rotary embeddings, on the device.
            dtype: the queries' and keys'.
            terms: the attention's terms of all layers.
            trained: whether the tokens asked for are the trained ones, for a loss, or all that were sampled.
            experts: whether layers have experts, whose routers have to know the padding.
            states: whether layers have a state, which they compute by segments.
        """
        device, terms = position.device.type, tuple(terms)
        segmented = states or any(kernel_for(device, dtype, one) is by_segments for one in terms)
        uses = key_uses(device, dtype, terms)
        for samples, tree, division in zip(self.samples, self.trees, self.divisions, strict=True):
            chosen = torch.tensor(samples, dtype=torch.int64)
            part = batch.select(chosen)
            inputs = ComputedTokens.of(part.offsets, tree, division, position.place.cp)
            lengths = [piece.tokens for piece in pieces_with_padding(division, position.place.cp)]
            apart = len(division.pieces) > 1 or tree.is_shared
            keys = [visible_keys(division, position.place.cp, tree, use) for use in uses] if apart else []
            sequences = packed_sequences(lengths, rotaries, dtype, keys, segmented=segmented)
            if experts:
                routed = _routed(part, division, inputs, position)
                sequences = replace(sequences, routed=routed)
            shift = batch.offsets[chosen] - part.offsets[:-1]
            yield _micro_batch(part, shift, inputs, division.size, sequences, position, trained=trained)


def _size(copies: KeyCopies, family: RowFamily) -> int:
    """Return the tokens that take as much memory as a family."""
    return family.tokens + ceil(copies.share * family.copies(copies.window))


def _filling_stages(
    pack_into: Callable[[int], list[list[RowFamily]]],
    families: Sequence[RowFamily],
    budget: int,
    position: Position,
) -> list[list[RowFamily]]:
    """Pack into as many micro-batches as keep the stages of a pipeline busy.

    Stages wait for one micro-batch less than there are stages, with a virtual pipeline for a part of it, and
    a family that is cut computes what its parts share again: the sum of both is the smallest.
    """
    stages = position.config.pipeline_model_parallel_size
    chunks = position.config.virtual_pipeline_model_parallel_size
    total = sum(family.tokens for family in families)
    limits = [-(-total // (number * stages)) for number in PASSES_OF_A_STAGE]
    best: tuple[float, list[list[RowFamily]]] | None = None
    for limit in (*(max(1, min(limit, budget)) for limit in limits), budget):
        packed = pack_into(limit)
        sizes = [sum(part.tokens for part in one) for one in packed]
        time = sum(sizes) + max(sizes) * (stages - 1) / chunks
        if best is None or time < best[0]:
            best = time, packed
    assert best is not None
    packed = best[1]
    if chunks > 1:
        parts = [part for one in packed for part in one]
        places = iter(range(len(parts)))
        numbers = [[next(places) for _ in one] for one in packed]
        filled = fill_groups(numbers, [part.tokens for part in parts], stages)
        packed = [[parts[place] for place in one] for one in filled]
    return packed


def _micro_batch(
    part: Batch,
    shift: torch.Tensor,
    inputs: ComputedTokens,
    size: int,
    sequences: RotarySequences,
    position: Position,
    *,
    trained: bool,
) -> MicroBatch:
    """Make a micro-batch of some samples of a replica.

    Args:
        part: the samples.
        shift: int64 [n]: where each of them begins among the replica's tokens, less where it does in `part`.
        inputs: the tokens of `part` that this rank computes.
        size: tokens that this rank computes, with padding.
        sequences: describes them.
        position: this rank's place.
        trained: as in `Packing.micro_batches`.
    """
    device = position.device
    tokens = torch.zeros(1, size, dtype=torch.int64)
    tokens[0, : len(inputs.tokens)] = part.tokens[inputs.tokens]
    asked = torch.zeros_like(part.loss_mask)
    asked[inputs.row_tokens + 1] = (part.loss_mask if trained else part.sampled_mask)[inputs.row_tokens + 1]
    rows = inputs.predictors(len(part.tokens))
    place = asked.nonzero()[:, 0]
    row, target = rows[place], part.tokens[place].long()
    if not len(place):
        row = target = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(
        inputs=to_device(tokens, device),
        sequences=sequences,
        rows=to_device(row, device),
        targets=to_device(target, device),
        wanted=len(place),
        places=to_device(place + shift[part.sample_index[place]], device),
        trained=_trained(replace(part, loss_mask=asked), position) if trained else None,
    )


def _divisor(position: Position) -> int:
    """Return the divisor of a micro-batch's number of tokens."""
    return position.config.tensor_model_parallel_size if position.sequence_parallel else 1


def _trained(part: Batch, position: Position) -> TrainedTokens:
    """Return the trained tokens of this rank; others of the same samples are on its context ranks."""
    tokens = _on(trained_tokens(part), position.device)
    if position.config.context_parallel_size > 1:
        tokens = replace(tokens, join=sum_over_context_ranks)
    return tokens


def _routed(part: Batch, division: Division, inputs: ComputedTokens, position: Position) -> RoutedTokens:
    """Describe the tokens that this rank has in sequence-parallel regions."""
    routed = routed_tokens(
        (part.lengths - 1).tolist(),
        part.sample_index[inputs.row_tokens],
        inputs.places,
        division.size,
        part.totals.samples,
        shares=part.shares,
        experts=None if part.experts is None else part.experts[inputs.tokens],
        part=position.place.tp if position.sequence_parallel else 0,
        parts=_divisor(position),
    )
    return _on(routed, position.device)


def _on(tokens: T, device: torch.device) -> T:
    arrays = {
        field.name: to_device(value, device)
        for field in fields(tokens)  # type: ignore[arg-type]
        if isinstance(value := getattr(tokens, field.name), torch.Tensor)
    }
    moved: T = replace(tokens, **arrays)  # type: ignore[type-var, arg-type]
    return moved

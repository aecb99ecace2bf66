"""Packs a replica's samples into micro-batches, and builds each micro-batch on demand.

With context parallelism, a rank builds its own part of a micro-batch. Every rank of a replica has the whole
samples, including the token after the end of each piece.

Shapes: T input tokens of a micro-batch on this rank, of which k predict a requested token.
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

MICRO_BATCHES_PER_STAGE = (4, 2, 1)
"""Candidates for the number of micro-batches per pipeline stage; the pipeline idles for (stages - 1) of these
passes. The first number is used unless passes this small recompute too many shared tokens."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed samples without their last tokens, which have no next token.

    Shared prefixes are included once. With context parallelism, the tokens are this rank's pieces.
    """

    inputs: torch.Tensor
    """int64 [1, T], on the device."""
    sequences: RotarySequences
    rows: torch.Tensor
    """int64 [max(k, 1)], on the device: inputs that predict the requested tokens. Without requested tokens,
    the first input: every pass needs a row so that every parameter is in its graph."""
    targets: torch.Tensor
    """int64 [max(k, 1)], on the device: the requested tokens."""
    wanted: int
    """k."""
    places: torch.Tensor
    """int64 [k], on the device: index of each requested token among the replica's tokens."""
    trained: TrainedTokens | None
    """Trained tokens, on the device; None if no loss is computed."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Split of a replica's samples into one or more micro-batches, which may be empty."""

    samples: tuple[tuple[int, ...], ...]
    """Sample indices of each micro-batch."""
    trees: tuple[PrefixTree, ...]
    """Prefix tree of each micro-batch's inputs; its rows are numbered as in `samples`."""
    divisions: tuple[Division, ...]
    """Split of each micro-batch's stretches over the context ranks."""
    row_tokens: int
    """Inputs of all samples. A shared prefix counts once per sample."""

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
        """Pack samples into micro-batches.

        A family with more tokens than a micro-batch is cut. With sequence parallelism, a micro-batch is
        padded to a multiple of the tensor ranks. With a pipeline, there are several micro-batches per stage,
        if there are enough samples, to keep all stages busy. With context parallelism, a micro-batch has the
        tokens of all context ranks. A replica without samples runs with one token per rank. A virtual
        pipeline needs the number of micro-batches to be a multiple of the number of stages: the fullest are
        split, or empty ones added.

        Args:
            families: families of the samples.
            position: a rank's position in the layout.
            micro_batch_tokens: token limit of a micro-batch on each rank; only a single sample may exceed it.
            micro_batch_size: sample limit of a micro-batch.
            copies: memory of copied shared keys and values, in tokens.
        """
        ranks = position.config.context_parallel_size
        budget, stages = micro_batch_tokens * ranks, position.config.pipeline_model_parallel_size
        size = partial(_size, copies)
        pack_into = partial(pack_families, families, max_rows=micro_batch_size, size=size)
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
        """Return the packing extended to `passes` micro-batches by empty ones."""
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
        """Tokens that each micro-batch computes on this rank, and on every other context rank."""
        return tuple(division.size for division in self.divisions)

    @property
    def tokens(self) -> int:
        """Tokens computed by all micro-batches on all context ranks."""
        return sum(division.size * len(division.pieces) for division in self.divisions)

    @property
    def padding(self) -> int:
        """Padding tokens of all micro-batches on all context ranks."""
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
        """Yield the micro-batches in order, building each on demand.

        Args:
            batch: this replica's part of the batch, on the host.
            position: this rank's position in the layout.
            rotaries: rotary embeddings of the model, on the device.
            dtype: dtype of queries and keys.
            terms: attention terms of all layers.
            trained: whether the requested tokens are the trained tokens, for a loss, or all sampled tokens.
            experts: whether layers have experts, whose routers must ignore the padding.
            states: whether layers have a state, which is computed by segments.
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
    """Return a family's memory use, as an equivalent number of tokens."""
    return family.tokens + ceil(copies.share * family.copies(copies.window))


def _filling_stages(
    pack_into: Callable[[int], list[list[RowFamily]]],
    families: Sequence[RowFamily],
    budget: int,
    position: Position,
) -> list[list[RowFamily]]:
    """Pack into enough micro-batches to keep the stages of a pipeline busy.

    Minimizes the sum of two costs: the pipeline idles for (stages - 1) micro-batches, divided by the chunks
    of a virtual pipeline; and parts of a cut family recompute shared tokens.
    """
    stages = position.config.pipeline_model_parallel_size
    chunks = position.config.virtual_pipeline_model_parallel_size
    total = sum(family.tokens for family in families)
    limits = [-(-total // (number * stages)) for number in MICRO_BATCHES_PER_STAGE]
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
    """Build a micro-batch from some samples of a replica.

    Args:
        part: batch of the samples.
        shift: int64 [n]: offset of each sample in the replica's tokens minus its offset in `part`.
        inputs: tokens of `part` that this rank computes.
        size: number of tokens that this rank computes, with padding.
        sequences: layout of the packed sequences.
        position: this rank's position in the layout.
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
    """Return the number that must divide a micro-batch's token count."""
    return position.config.tensor_model_parallel_size if position.sequence_parallel else 1


def _trained(part: Batch, position: Position) -> TrainedTokens:
    """Return the trained tokens of this rank. Its context ranks have the samples' other tokens."""
    tokens = _on(trained_tokens(part), position.device)
    if position.config.context_parallel_size > 1:
        tokens = replace(tokens, join=sum_over_context_ranks)
    return tokens


def _routed(part: Batch, division: Division, inputs: ComputedTokens, position: Position) -> RoutedTokens:
    """Return the routing metadata of this rank's tokens in sequence-parallel regions."""
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

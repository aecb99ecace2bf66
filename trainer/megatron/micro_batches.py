"""Packs a replica's samples into micro-batches, and makes each one as it is needed.

With context parallelism a rank makes its part of it: every rank of a replica has the whole samples, so also
the token that follows the last one of a piece.

Shapes: T tokens of a micro-batch that are inputs on this rank, k of them predict a requested token.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from trainer.batch import Batch, TrainedTokens, trained_tokens
from trainer.data.context_division import Division
from trainer.data.packing import fill_groups, pack
from trainer.megatron.layers.attention.context import sum_over_context_ranks
from trainer.megatron.layers.attention.core import by_segments, kernel_for
from trainer.megatron.layers.attention.rotary import Rotary
from trainer.megatron.layers.attention.sequences import PackedSequences, packed_sequences, to_device
from trainer.megatron.layers.attention.terms import AttentionTerms
from trainer.megatron.layers.attention.visible import pieces_with_padding, ranges, visible_keys
from trainer.megatron.layers.experts.tokens import RoutedTokens, routed_tokens
from trainer.megatron.parallel import Position

T = TypeVar("T", TrainedTokens, RoutedTokens)

PASSES_OF_A_STAGE = 4
"""With a pipeline, micro-batches for each stage, at least: stages wait for (stages - 1) of so many passes."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples one after the other, each without its last token, which has no successor.

    With context parallelism they are this rank's pieces of them.
    """

    inputs: torch.Tensor
    """int64 [1, T], on the device."""
    sequences: PackedSequences
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
    divisions: tuple[Division, ...]
    """How the inputs of each are divided between the context ranks."""

    @classmethod
    def of(
        cls, lengths: torch.Tensor, position: Position, micro_batch_tokens: int, micro_batch_size: int
    ) -> "Packing":
        """Pack samples.

        With sequence parallelism a micro-batch is padded to a multiple of the tensor ranks. With a pipeline
        there are several for each stage, if there are as many samples, so that the stages work at the same
        time. With context parallelism one has the tokens of all context ranks. A replica without samples
        takes part with one token a rank. A virtual pipeline takes micro-batches in groups of as many as there
        are stages: the fullest are divided, or empty ones added, to fill the last.

        Args:
            lengths: int64 [n].
            position: a rank's place in the layout.
            micro_batch_tokens: tokens of a micro-batch on each rank, at most, unless one sample has more.
            micro_batch_size: samples of a micro-batch, at most.
        """
        inputs = (lengths - 1).tolist()
        stages, ranks = position.config.pipeline_model_parallel_size, position.config.context_parallel_size
        budget = micro_batch_tokens * ranks
        if stages > 1:
            enough = -(-sum(inputs) // (PASSES_OF_A_STAGE * stages))
            budget = min(budget, enough)
        packed = pack(inputs, budget, micro_batch_size) or [[]]
        if position.config.virtual_pipeline_model_parallel_size > 1:
            packed = fill_groups(packed, inputs, stages)
        divisions = (
            Division.of([inputs[sample] for sample in samples], ranks, _divisor(position))
            for samples in packed
        )
        return cls(tuple(map(tuple, packed)), tuple(divisions))

    def __len__(self) -> int:
        return len(self.samples)

    def filled(self, passes: int, position: Position) -> "Packing":
        """Return it with empty micro-batches at the end, `passes` in all."""
        more = passes - len(self)
        empty = Division.of([], position.config.context_parallel_size, _divisor(position))
        return Packing(self.samples + ((),) * more, self.divisions + (empty,) * more)

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
        """
        segmented = any(kernel_for(position.device.type, dtype, one) is by_segments for one in terms)
        for samples, division in zip(self.samples, self.divisions, strict=True):
            chosen = torch.tensor(samples, dtype=torch.int64)
            part = batch.select(chosen)
            inputs = _inputs(part, division, position)
            lengths = [piece.tokens for piece in pieces_with_padding(division, position.cp)]
            sequences = packed_sequences(
                lengths,
                rotaries,
                dtype,
                segmented=segmented,
                keys=visible_keys(division, position.cp) if len(division.pieces) > 1 else None,
            )
            if experts:
                routed = _routed(part, division, inputs, position)
                sequences = dataclasses.replace(sequences, routed=routed)
            shift = batch.offsets[chosen] - part.offsets[:-1]
            yield _micro_batch(part, shift, inputs, division.size, sequences, position, trained=trained)


def _micro_batch(
    part: Batch,
    shift: torch.Tensor,
    inputs: torch.Tensor,
    size: int,
    sequences: PackedSequences,
    position: Position,
    *,
    trained: bool,
) -> MicroBatch:
    """Make a micro-batch of some samples of a replica.

    Args:
        part: the samples.
        shift: int64 [n]: where each of them begins among the replica's tokens, less where it does in `part`.
        inputs: what `_inputs` returns.
        size: tokens that this rank computes.
        sequences: describes them.
        position: this rank's place.
        trained: as in `Packing.micro_batches`.
    """
    device = position.device
    tokens = torch.zeros(1, size, dtype=torch.int64)
    tokens[0, : len(inputs)] = part.tokens[inputs]
    asked = torch.zeros_like(part.loss_mask)
    asked[inputs + 1] = (part.loss_mask if trained else part.sampled_mask)[inputs + 1]
    rows = torch.zeros(len(part.tokens), dtype=torch.int64)
    rows[inputs + 1] = torch.arange(len(inputs))
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
        trained=_trained(dataclasses.replace(part, loss_mask=asked), position) if trained else None,
    )


def _divisor(position: Position) -> int:
    """Return the divisor of a micro-batch's number of tokens."""
    return position.config.tensor_model_parallel_size if position.sequence_parallel else 1


def _inputs(part: Batch, division: Division, position: Position) -> torch.Tensor:
    """Return which tokens of a micro-batch's samples this context rank computes, int64, in their order."""
    pieces = division.pieces[position.cp]
    table = torch.tensor([(p.sequence, p.start, p.tokens) for p in pieces], dtype=torch.int64).view(-1, 3)
    return ranges(part.offsets[table[:, 0]] + table[:, 1], table[:, 2])


def _trained(part: Batch, position: Position) -> TrainedTokens:
    """Return the trained tokens of this rank; others of the same samples are on its context ranks."""
    tokens = _on(trained_tokens(part), position.device)
    if position.config.context_parallel_size > 1:
        tokens = dataclasses.replace(tokens, join=sum_over_context_ranks)
    return tokens


def _routed(part: Batch, division: Division, inputs: torch.Tensor, position: Position) -> RoutedTokens:
    """Describe the tokens that this rank has in sequence-parallel regions."""
    lengths, pieces = (part.lengths - 1).tolist(), division.pieces[position.cp]
    owners = torch.tensor([*(piece.sequence for piece in pieces), len(lengths)])
    counts = torch.tensor([*(piece.tokens for piece in pieces), division.size - len(inputs)])
    routed = routed_tokens(
        lengths,
        owners.repeat_interleave(counts),
        part.totals.samples,
        shares=part.shares,
        experts=None if part.experts is None else part.experts[inputs],
        part=position.tp if position.sequence_parallel else 0,
        parts=_divisor(position),
    )
    return _on(routed, position.device)


def _on(tokens: T, device: torch.device) -> T:
    arrays = {
        field.name: to_device(value, device)
        for field in dataclasses.fields(tokens)  # type: ignore[arg-type]
        if isinstance(value := getattr(tokens, field.name), torch.Tensor)
    }
    moved: T = dataclasses.replace(tokens, **arrays)  # type: ignore[type-var, arg-type]
    return moved

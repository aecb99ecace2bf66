"""Packs a replica's samples into micro-batches, and makes each one as it is needed.

Shapes: T tokens of a micro-batch that are inputs, k of which predict a token that is asked for.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from trainer.batch import Batch, TrainedTokens, trained_tokens
from trainer.data.packing import pack
from trainer.megatron.layers.attention.core import by_segments, kernel_for
from trainer.megatron.layers.attention.rotary import Rotary
from trainer.megatron.layers.attention.sequences import PackedSequences, packed_sequences, to_device
from trainer.megatron.layers.attention.terms import AttentionTerms
from trainer.megatron.layers.experts.tokens import RoutedTokens, routed_tokens
from trainer.megatron.parallel import Position

T = TypeVar("T", TrainedTokens, RoutedTokens)

PASSES_OF_A_STAGE = 4
"""With a pipeline, micro-batches for each stage, at least: stages wait for (stages - 1) of so many passes."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples one after the other, each without its last token, which predicts nothing."""

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
    sizes: tuple[int, ...]
    """Tokens that each computes."""
    padding: int
    """Tokens in all of them that are no sample's."""

    @classmethod
    def of(
        cls, lengths: torch.Tensor, position: Position, micro_batch_tokens: int, micro_batch_size: int
    ) -> "Packing":
        """Pack samples.

        With sequence parallelism a micro-batch is padded to a multiple of the tensor ranks. With a pipeline
        there are several for each stage, if there are as many samples, so that the stages work at the same
        time. A replica without samples takes part with one token.

        Args:
            lengths: int64 [n].
            position: a rank's place in the layout.
            micro_batch_tokens: tokens of a micro-batch, at most, unless one sample has more.
            micro_batch_size: samples of a micro-batch, at most.
        """
        inputs = (lengths - 1).tolist()
        stages = position.config.pipeline_model_parallel_size
        if stages > 1:
            enough = -(-sum(inputs) // (PASSES_OF_A_STAGE * stages))
            micro_batch_tokens = min(micro_batch_tokens, enough)
        packed = pack(inputs, micro_batch_tokens, micro_batch_size) or [[]]
        divisor = _divisor(position)
        real = [sum(inputs[sample] for sample in samples) for samples in packed]
        sizes = [max(-(-size // divisor), 1) * divisor for size in real]
        return cls(tuple(map(tuple, packed)), tuple(sizes), sum(sizes) - sum(real))

    def __len__(self) -> int:
        return len(self.samples)

    def filled(self, passes: int, position: Position) -> "Packing":
        """Return it with empty micro-batches at the end, `passes` in all."""
        more = passes - len(self)
        size = _divisor(position)
        return Packing(self.samples + ((),) * more, self.sizes + (size,) * more, self.padding + size * more)

    @property
    def tokens(self) -> int:
        """Tokens that all of them compute."""
        return sum(self.sizes)

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
            dtype: that of queries and keys.
            terms: those of the attention of all layers.
            trained: whether the tokens asked for are the trained ones, for a loss, or all that were sampled.
            experts: whether layers have experts, whose routers have to know what is padding.
        """
        segmented = any(kernel_for(position.device.type, dtype, one) is by_segments for one in terms)
        for samples, size in zip(self.samples, self.sizes, strict=True):
            chosen = torch.tensor(samples, dtype=torch.int64)
            part = batch.select(chosen)
            lengths = [length for length in (part.lengths - 1).tolist() if length]
            padding = size - sum(lengths)
            sequences = packed_sequences(
                [*lengths, padding] if padding else lengths, rotaries, dtype, segmented=segmented
            )
            if experts:
                routed = _routed(part, lengths, padding, position)
                sequences = dataclasses.replace(sequences, routed=routed)
            yield _micro_batch(batch, chosen, part, size, sequences, position.device, trained=trained)


def _micro_batch(
    batch: Batch,
    samples: torch.Tensor,
    part: Batch,
    size: int,
    sequences: PackedSequences,
    device: torch.device,
    *,
    trained: bool,
) -> MicroBatch:
    index = part.sample_index
    tokens = torch.zeros(1, size, dtype=torch.int64)
    kept = part.tokens[_inputs(part)]
    tokens[0, : len(kept)] = kept
    mask = (part.loss_mask if trained else part.sampled_mask).clone()
    mask[part.offsets[:-1]] = False
    place = mask.nonzero()[:, 0]
    row, target = place - 1 - index[place], part.tokens[place].long()
    if not len(place):
        row = target = torch.zeros(1, dtype=torch.int64)
    shift = batch.offsets[samples] - part.offsets[:-1]
    return MicroBatch(
        inputs=to_device(tokens, device),
        sequences=sequences,
        rows=to_device(row, device),
        targets=to_device(target, device),
        wanted=len(place),
        places=to_device(place + shift[index[place]], device),
        trained=_on(trained_tokens(part), device) if trained else None,
    )


def _divisor(position: Position) -> int:
    """Return what the tokens of a micro-batch are a multiple of."""
    return position.config.tensor_model_parallel_size if position.sequence_parallel else 1


def _routed(part: Batch, lengths: list[int], padding: int, position: Position) -> RoutedTokens:
    """Describe the tokens that this rank has in sequence-parallel regions."""
    routed = routed_tokens(
        lengths,
        padding,
        part.totals.samples,
        experts=None if part.experts is None else part.experts[_inputs(part)],
        part=position.tp if position.sequence_parallel else 0,
        parts=_divisor(position),
    )
    return _on(routed, position.device)


def _inputs(part: Batch) -> torch.Tensor:
    """Return which tokens are inputs, bool [t]: all but the last of each sample."""
    inputs = torch.ones(len(part.tokens), dtype=torch.bool)
    inputs[part.offsets[1:] - 1] = False
    return inputs


def _on(tokens: T, device: torch.device) -> T:
    arrays = {
        field.name: to_device(value, device)
        for field in dataclasses.fields(tokens)  # type: ignore[arg-type]
        if isinstance(value := getattr(tokens, field.name), torch.Tensor)
    }
    moved: T = dataclasses.replace(tokens, **arrays)  # type: ignore[type-var, arg-type]
    return moved

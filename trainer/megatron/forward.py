"""Runs forward and backward passes of a whole batch through megatron's schedule.

Shapes: N samples and L tokens of the batch; n samples and l tokens of a micro-batch; T tokens whose logits
are computed. The logits at position i predict token i + 1, so a forward pass takes tokens 0 .. l - 2.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func

from trainer.algorithms.base import Algorithm
from trainer.backends.step_measures import StepMeasures
from trainer.batch import Batch, part_of
from trainer.megatron.architecture import Architecture
from trainer.megatron.model import OutputRows
from trainer.megatron.parallel import Position
from trainer.megatron.vocab_parallel import vocab_parallel_logprobs


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A few samples of the batch, cut to the longest of them."""

    samples: torch.Tensor
    """int64 [n]: rows of the batch; padding repeats row 0 and asks for no token of it."""
    inputs: torch.Tensor
    """int64 [n, l - 1], on the device; more columns where the sequence must divide by the tensor ranks."""
    rows: torch.Tensor
    """int64 [T]: sample within the micro-batch of each token whose log-probability is asked for."""
    columns: torch.Tensor
    """int64 [T]: position of that token in the sequence, from 1."""
    targets: torch.Tensor
    """int64 [T]: the token itself."""


def split_batch(
    batch: Batch, mask: torch.Tensor, position: Position, micro_batch_size: int
) -> list[MicroBatch]:
    """Return this data-parallel rank's micro-batches; every rank gets equally many.

    Samples are sorted by length, so that those of a micro-batch need little padding, and dealt to the ranks
    in turn. With a pipeline all micro-batches have one shape, as its stages agree on it beforehand.

    Args:
        batch: the whole batch.
        mask: bool [N, L]: tokens whose log-probabilities are wanted.
        position: this rank's place in the layout.
        micro_batch_size: samples of a micro-batch.
    """
    count, pieces = len(batch.sequence_lengths), position.config.data_parallel_size
    size = max(1, min(micro_batch_size, -(-count // pieces)))
    uniform = position.config.pipeline_model_parallel_size > 1
    order = torch.argsort(batch.sequence_lengths, stable=True)
    chunks = list(order.split(size))
    result = []
    for first in range(0, len(chunks), pieces):
        mine = chunks[first + position.dp] if first + position.dp < len(chunks) else order[:0]
        result.append(
            _micro_batch(batch, mask, position, mine, size if uniform else max(1, len(mine)), uniform)
        )
    return result


def _micro_batch(
    batch: Batch, mask: torch.Tensor, position: Position, samples: torch.Tensor, size: int, uniform: bool
) -> MicroBatch:
    padding = size - len(samples)
    samples = torch.cat([samples, samples.new_zeros(padding)])
    lengths = batch.sequence_lengths if uniform else batch.sequence_lengths[samples]
    length = max(2, int(lengths.max()))
    inputs = batch.tokens[samples, : length - 1]
    if position.sequence_parallel:
        inputs = torch.nn.functional.pad(
            inputs, (0, -inputs.size(1) % position.config.tensor_model_parallel_size)
        )
    wanted = mask[samples, :length].clone()
    wanted[:, 0] = False
    wanted[size - padding :] = False
    rows, columns = wanted.nonzero(as_tuple=True)
    to = partial(torch.Tensor.to, device=position.device)
    return MicroBatch(samples, to(inputs), to(rows), to(columns), to(batch.tokens[samples[rows], columns]))


class Runner:
    """Runs a model over batches: with gradients for a step, without for log-probabilities."""

    def __init__(
        self, model: Any, architecture: Architecture, position: Position, micro_batch_size: int
    ) -> None:
        """Bind to a model (GPTModel, or DistributedDataParallel around one)."""
        self.model = model
        self.architecture = architecture
        self.position = position
        self.micro_batch_size = micro_batch_size
        inner = model if isinstance(model, GPTModel) else model.module
        # In sequence-parallel layouts the output layer gathers the sequence itself; its logits are selected
        # afterwards.
        self._rows = OutputRows(inner) if inner.post_process and not position.sequence_parallel else None

    def train(self, batch: Batch, algorithm: Algorithm, measures: StepMeasures) -> torch.Tensor:
        """Run forward and backward over the batch; the model's buffers then hold the complete gradients.

        Returns:
            The vector of `measures` for the whole batch, equal on every rank.
        """
        context = _LossContext(batch, algorithm, algorithm.token_weights(batch), measures)
        outputs = self._run(batch, batch.loss_mask, partial(self._loss, context), forward_only=False)
        vector = measures.join(outputs if self.position.tp == 0 else (), self.position.device)
        sums, maxima = measures.split(vector)
        dist.all_reduce(sums)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        return vector

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> torch.Tensor:
        """Return the log-probabilities of the sampled tokens, 0 elsewhere.

        float32 [N, L] on the CPU, complete on every rank.
        """
        outputs = self._run(batch, batch.sampled_mask, self._collect, forward_only=True)
        result = torch.zeros(batch.tokens.shape, dtype=torch.float32, device=self.position.device)
        if self.position.tp == 0:
            for samples, columns, values in outputs:
                result[samples, columns] = values
        dist.all_reduce(result)
        return result.cpu()

    def _run(self, batch: Batch, mask: torch.Tensor, finish: Any, *, forward_only: bool) -> list[Any]:
        micro_batches = split_batch(batch, mask, self.position, self.micro_batch_size)
        length = micro_batches[0].inputs.size(1)
        outputs: list[Any] = get_forward_backward_func()(
            forward_step_func=partial(self._forward, batch.temperature, finish),
            data_iterator=iter(micro_batches),
            model=self.model,
            num_microbatches=len(micro_batches),
            seq_length=length,
            micro_batch_size=len(micro_batches[0].samples),
            forward_only=forward_only,
        )
        return outputs

    def _forward(
        self, temperature: float, finish: Any, micro_batches: Iterator[MicroBatch], model: Any
    ) -> tuple[torch.Tensor, Any]:
        """Make megatron's forward step: return the stage's output, and what turns it into a loss."""
        micro = next(micro_batches)
        if self._rows is not None:
            index = (micro.columns - 1) * len(micro.samples) + micro.rows
            # Without a token to train a micro-batch still passes one row, so that every parameter is in its
            # graph.
            self._rows.index = index if len(index) else index.new_zeros(1)
        logits = model(micro.inputs, None, None)
        return logits, partial(self._score, temperature, finish, micro)

    def _score(
        self, temperature: float, finish: Any, micro: MicroBatch, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        logits = (
            logits[0, : len(micro.rows)] if self._rows is not None else logits[micro.rows, micro.columns - 1]
        )
        logprobs, entropy = vocab_parallel_logprobs(
            logits,
            micro.targets,
            vocabulary=self.architecture.vocabulary,
            temperature=temperature,
            rank=self.position.tp,
            size=self.position.config.tensor_model_parallel_size,
            group=mpu.get_tensor_model_parallel_group(),
        )
        loss, output = finish(micro, logprobs, entropy)
        # No tokens to divide by: the loss is a sum, its weights hold every normalization.
        return loss, torch.zeros((), dtype=torch.int32, device=logits.device), output

    @staticmethod
    def _loss(
        context: "_LossContext", micro: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return context.loss(micro, logprobs, entropy)

    @staticmethod
    def _collect(
        micro: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        samples = micro.samples.to(micro.rows.device)[micro.rows]
        return logprobs.sum(), (samples, micro.columns, logprobs)


@dataclass(frozen=True, slots=True)
class _LossContext:
    """What the loss of a micro-batch needs of the whole batch."""

    batch: Batch
    algorithm: Algorithm
    weights: torch.Tensor
    """float32 [N, L]."""
    measures: StepMeasures

    def loss(
        self, micro: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the micro-batch's part of the sum, and what was measured of it."""
        part, place = part_of(self.batch, micro.samples, logprobs.device), (micro.rows, micro.columns)

        def spread(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(part.tokens.shape).index_put(place, values)

        # padding repeats a sample, so the place says what is trained here
        part = replace(part, loss_mask=spread(torch.ones_like(micro.rows, dtype=torch.bool)))
        spread_logprobs, spread_entropy = spread(logprobs), spread(entropy)
        tokens = self.algorithm.token_loss(
            spread_logprobs,
            part.behaviour_logprobs,
            part.advantages,
            entropy=spread_entropy if self.algorithm.config.entropy_coef else None,
            proximal_logprobs=part.proximal_logprobs,
            reference_logprobs=part.reference_logprobs,
        )
        weights = self.weights[micro.samples, : part.tokens.shape[1]].to(logprobs.device)[place]
        loss = (tokens.loss[place] * weights).sum()
        # Keeps a graph to the parameters where a micro-batch trains no token.
        loss = loss + 0.0 * logprobs.sum()
        return loss, self.measures.measure(part, loss, tokens, spread_logprobs, spread_entropy)

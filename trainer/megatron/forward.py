"""Runs forward and backward passes over a replica's part of a batch with megatron's schedule.

Shapes: t tokens of the part; T tokens of a micro-batch, of which k have requested log-probabilities. The
hidden state of a token predicts the next token, so the last token of a sample is not an input.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import tee
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from trainer.batch import Batch
from trainer.data.prefix_tree import batch_families, single_row_families
from trainer.layers.head import linear_logprobs, linear_logprobs_no_grad
from trainer.layers.limits import NO_COPIES, KeyCopies
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.layers.experts.balance import loads_by_layer, updated_bias
from trainer.megatron.layers.experts.router import ExpertRouter, check_recorded
from trainer.megatron.layers.spec import attention_terms
from trainer.megatron.micro_batches import MicroBatch, Packing
from trainer.megatron.model import PackedModel
from trainer.megatron.parallel import Position
from trainer.roles.value_measures import ValueMeasures
from trainer.step.measures import PassResult, StepMeasures

log = logging.getLogger("tether.trainer")

NO_PREFIX_SHARING = "samples share no prefix: the state of a gated delta net has seen all of it"
Finish = Callable[..., tuple[torch.Tensor, Any]]
"""(trained tokens, outputs of the head) -> loss of a micro-batch, and its measurements."""


class Runner:
    """Executor of a model's passes: with gradients for training, without for log-probabilities."""

    def __init__(
        self,
        chunks: Sequence[Any],
        architecture: Architecture,
        position: Position,
        micro_batch_tokens: int,
        micro_batch_size: int,
        *,
        replays_routing: bool = False,
        shares_prefixes: bool = False,
        copies: KeyCopies = NO_COPIES,
    ) -> None:
        """Bind the runner to a model.

        Args:
            chunks: this rank's chunks, each a PackedModel or DistributedDataParallel around one.
            architecture: architecture of the whole model.
            position: this rank's position in the layout.
            micro_batch_tokens: tokens per micro-batch on each rank; see `Packing`.
            micro_batch_size: maximum number of samples per micro-batch.
            replays_routing: whether routers use the experts that the engine recorded.
            shares_prefixes: whether common prefixes of a group's samples are computed once; ignored if a
                layer has a state.
            copies: memory of copied shared keys, in tokens of a micro-batch.
        """
        self.chunks = list(chunks)
        self.replays_routing = replays_routing
        self.shares_prefixes = shares_prefixes and architecture.delta is None
        if self.shares_prefixes != shares_prefixes:
            log.warning("trainer.alone model=%s reason=%r", architecture.name, NO_PREFIX_SHARING)
        self._copies = copies
        self.architecture = architecture
        self.position = position
        self.micro_batch_tokens = micro_batch_tokens
        self.micro_batch_size = micro_batch_size
        self._inner: list[PackedModel] = [
            chunk if isinstance(chunk, PackedModel) else chunk.module for chunk in chunks
        ]
        self.routers = [
            module for chunk in self._inner for module in chunk.modules() if isinstance(module, ExpertRouter)
        ]
        self.loads = torch.zeros(0, 0)
        """Tokens per expert in the last step: float64 [layers, experts], equal on every rank."""
        scaled = [rope for rope in architecture.ropes if rope.long_factor]
        self._long_after = max((rope.original_max_position_embeddings for rope in scaled), default=0)
        self._terms = {attention_terms(architecture, layer) for layer in range(architecture.layers)}

    @torch.no_grad()
    def update_biases(self, rate: float) -> None:
        """Update the routers' expert biases after a step from the expert loads; no change if `rate` is 0."""
        for router in self.routers if rate else ():
            if router.bias is not None:
                router.bias.copy_(updated_bias(router.bias, self.loads[router.layer].to(router.bias), rate))

    def counts(self, batch: Batch) -> list[tuple[int, int]]:
        """Return the number of samples and tokens of each micro-batch of this rank."""
        packing = self._packing(batch)
        return list(zip(map(len, packing.samples), packing.sizes, strict=True))

    def _packing(self, batch: Batch) -> Packing:
        """Return the packing of a part into micro-batches."""
        families = single_row_families((batch.lengths - 1).tolist())
        if self.shares_prefixes:
            families = batch_families(batch, by_experts=self.replays_routing, long=self._long_after)
        limits = self.micro_batch_tokens, self.micro_batch_size
        return Packing.of(families, self.position, *limits, copies=self._copies)

    def train(self, batch: Batch, finish: Finish, measures: StepMeasures | ValueMeasures) -> PassResult:
        """Run forward and backward over the part, which fills the model's gradient buffers.

        Args:
            batch: this replica's part of the batch.
            finish: computes the loss of a micro-batch.
            measures: merges the vectors of all micro-batches.
        """
        packing = self._pad_to_replicas(self._packing(batch))
        for router in self.routers:
            router.forget()
        outputs = self._run(batch, packing, finish)
        position = self.position
        is_reporting_rank = position.place.tp == position.place.cp == 0 and position.last_stage
        vector = measures.join(outputs if position.place.tp == 0 else (), position.device)
        sums, maxima = measures.split(vector)
        computed = [packing.tokens, packing.padding, packing.row_tokens] if is_reporting_rank else [0, 0, 0]
        own_loads = [(router.layer, router.loads) for router in self.routers]
        experts = self.architecture.experts.count
        loads = loads_by_layer(own_loads, self.architecture.layers, experts).to(sums)
        summed = torch.cat([sums, sums.new_tensor(computed), loads.flatten()])
        largest = torch.cat([maxima, maxima.new_tensor([len(packing)])])
        dist.all_reduce(summed)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        sums, counts, whole = summed.split([len(sums), len(computed), loads.numel()])
        self.loads = whole.view_as(loads)
        return PassResult(torch.cat([sums, largest[:-1]]), int(largest[-1]), *map(int, counts.tolist()))

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Run forward over the part; return the head's values of sampled tokens, 0 for other tokens.

        The values are log-probabilities or a critic's values: float32 [t] on the CPU, on every rank of the
        replica.
        """
        packing = self._pad_to_replicas(self._packing(batch))
        outputs = self._run(batch, packing)
        result = torch.zeros(len(batch.tokens), dtype=torch.float32, device=self.position.device)
        for place, values in outputs:
            result[place] = values
        parallel = self.position.config
        if parallel.pipeline_model_parallel_size > 1:
            dist.all_reduce(result, group=mpu.get_pipeline_model_parallel_group())
        if parallel.context_parallel_size > 1:  # each token is on exactly one context rank
            dist.all_reduce(result, group=mpu.get_context_parallel_group())
        return result.cpu()

    def _pad_to_replicas(self, packing: Packing) -> Packing:
        """Pad a part to the highest number of micro-batches among replicas that share experts.

        In every pass, ranks that share experts wait for each other's tokens.
        """
        sizes = self.position.config
        if sizes.expert_model_parallel_size * sizes.expert_tensor_parallel_size == 1:
            return packing
        most = torch.tensor([len(packing)], device=self.position.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, mpu.get_expert_tensor_and_model_parallel_group())
        return packing.filled(int(most), self.position)

    def _run(self, batch: Batch, packing: Packing, finish: Finish | None = None) -> list[Any]:
        """Run all passes; only forward passes if `finish` is None."""
        if self.replays_routing:
            check_recorded(batch.experts, self.architecture.experts, self.architecture.layers)
        else:
            batch = dataclasses.replace(batch, experts=None)
        first, chunks = self._inner[0], len(self.chunks)
        micro_batches = packing.micro_batches(
            batch,
            self.position,
            first.rotaries,
            first.config.params_dtype,
            self._terms,
            trained=finish is not None,
            experts=self.architecture.experts.count > 0,
            states=self.architecture.delta is not None,
        )
        communicator = None
        groups = None
        stages = self.position.config.pipeline_model_parallel_size
        if stages > 1:
            groups = ProcessGroupCollection.use_mpu_process_groups()
            communicator = PlannedShapes(groups.pp, first.config, self._shapes(packing))
        schedule = get_forward_backward_func(stages, chunks if chunks > 1 else None)
        outputs: list[Any] = schedule(
            forward_step_func=partial(self._forward, batch.temperature, finish),
            # Each chunk iterates over all micro-batches; the first chunk to request one builds it.
            data_iterator=list(tee(micro_batches, chunks)) if chunks > 1 else micro_batches,
            model=self.chunks if chunks > 1 else self.chunks[0],
            num_microbatches=len(packing),
            seq_length=1,  # `PlannedShapes` provides the shapes
            micro_batch_size=1,
            forward_only=finish is None,
            p2p_communicator=communicator,
            pg_collection=groups,
        )
        return outputs

    def _shapes(self, packing: Packing) -> "ReceivedShapes":
        """Return the shapes of the tensors that this rank's stage receives."""
        config = self.position.config
        pieces = config.tensor_model_parallel_size if self.position.sequence_parallel else 1
        shapes = [(size // pieces, 1, self.architecture.hidden) for size in packing.sizes]
        if len(self.chunks) == 1:
            return ReceivedShapes(shapes, shapes)
        return interleaved_shapes(
            shapes,
            stages=config.pipeline_model_parallel_size,
            chunks=len(self.chunks),
            is_first=self.position.first_stage,
            is_last=self.position.last_stage,
        )

    def _forward(
        self, temperature: float, finish: Finish | None, micro_batches: Iterator[MicroBatch], model: Any
    ) -> tuple[torch.Tensor, Any]:
        """Run megatron's forward step: return the stage's output, and the function that computes its loss."""
        micro = next(micro_batches)
        hidden = model(micro.inputs, None, None, packed_seq_params=micro.sequences)
        return hidden, partial(self._score, temperature, finish, micro)

    def _score(
        self, temperature: float, finish: Finish | None, micro: MicroBatch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        if self.position.sequence_parallel:
            rows = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
            rows = rows[:, 0].index_select(0, micro.rows)
        else:
            rows = copy_to_tensor_model_parallel_region(hidden[:, 0].index_select(0, micro.rows))
        head: dict[str, Any] = {
            "vocabulary": self.architecture.vocabulary,
            "temperature": temperature,
            "softcap": self.architecture.logit_softcap,
            "rank": self.position.place.tp,
            "size": self.position.config.tensor_model_parallel_size,
            "group": mpu.get_tensor_model_parallel_group(),
            "bias": self._inner[-1].output_bias,
        }
        weight = self._inner[-1].output_weight
        if finish is None:
            found = linear_logprobs_no_grad(rows, weight, micro.targets, **head)[: micro.wanted]
            loss, output = found.sum(), (micro.places, found)
        else:
            logprobs, entropy = linear_logprobs(rows, weight, micro.targets, **head)
            loss, output = finish(micro.trained, logprobs[: micro.wanted], entropy[: micro.wanted])
        # No tokens to divide by: the loss is a sum whose weights contain every normalization.
        return loss, torch.zeros((), dtype=torch.int32, device=hidden.device), output


class ReceivedShapes(NamedTuple):
    """Shapes of the tensors that a stage receives in a step, in order."""

    activations: Sequence[tuple[int, ...]]
    """Activations from the previous stage."""
    gradients: Sequence[tuple[int, ...]]
    """Gradients from the next stage."""


def interleaved_shapes(
    shapes: Sequence[tuple[int, ...]], *, stages: int, chunks: int, is_first: bool, is_last: bool
) -> ReceivedShapes:
    """Return the shapes that a stage receives in the interleaved schedule.

    All stages run the passes of all chunks in one order, and the backward passes in the same order with the
    chunks reversed. The first stage receives activations for all chunks except the first, from the last
    stage. The last stage receives gradients for all chunks except the last, from the first stage.

    Args:
        shapes: shapes of the micro-batches.
        stages: number of pipeline stages.
        chunks: number of chunks per stage.
        is_first: whether the stage is the first.
        is_last: whether the stage is the last.
    """
    table = get_schedule_table(len(shapes), chunks, stages)
    every = [shapes[micro_batch] for micro_batch, _ in table]
    around = [shapes[micro_batch] for micro_batch, chunk in table if chunk < chunks - 1]
    return ReceivedShapes(around if is_first else every, around if is_last else every)


class PlannedShapes(P2PCommunicator):
    """megatron's communication between stages, without the messages that announce shapes.

    All ranks of a replica know the shapes in advance, so no stage waits for its device to read them.
    """

    def __init__(self, group: dist.ProcessGroup, config: Any, shapes: ReceivedShapes) -> None:
        super().__init__(group, config)
        self._forward, self._backward = iter(shapes.activations), iter(shapes.gradients)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        return next(self._forward) if recv_prev else None, next(self._backward) if recv_next else None

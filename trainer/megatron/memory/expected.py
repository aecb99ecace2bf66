"""Computes a rank's peak device memory of a step from the settings. Does not import torch.

Shapes: H hidden size, F of the MLP, D of a head, A query heads, K key heads, V vocabulary; P tensor ranks.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from trainer.config import OptimizerConfig, ParallelConfig, RecomputeGranularity, TrainerConfig
from trainer.layers.limits import LOGITS_MOST_BYTES, SCORES_CHUNK_BYTES
from trainer.megatron.convert.rules import padded_vocabulary
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.families.stages import stage_rules
from trainer.megatron.layout import Layout
from trainer.megatron.memory.activations import (
    COMMON,
    Activation,
    activations_of,
    delta_rule_elements,
    mlp_projections,
)
from trainer.megatron.memory.adapters import adapted_sizes
from trainer.memory.expected import ITEM_BYTES, ExpectedMemory

RECOMPUTES: tuple[RecomputeGranularity, ...] = ("", "selective", "full")
"""Kinds of recomputation, cheapest first."""
SCORE_COPIES = 3
"""Number of score-sized tensors at a time with softcapped scores: scores, gradient, an intermediate."""


@dataclass(frozen=True, slots=True)
class FrozenShape:
    """Frozen model: its architecture and placement."""

    architecture: Architecture
    offload: bool = False
    """Whether the model is on the device only during its own passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Facts that determine the memory of a rank."""

    architecture: Architecture
    parallel: ParallelConfig
    trainer: TrainerConfig
    optimizer: OptimizerConfig
    adapters: LoraConfig = NO_ADAPTERS
    reference: bool = False
    """Whether a copy of the model is stored as the reference."""
    frozen: tuple[FrozenShape, ...] = ()
    """Other models that are never trained."""
    shared: bool = False
    """Whether an engine shares the parameters, which requires separate masters in every dtype."""
    critic: Architecture | None = None
    """Critic that is trained too; its passes run after the policy's."""

    @property
    def layout(self) -> Layout:
        return Layout.of(self.parallel, self.architecture.layers)

    @property
    def models(self) -> tuple["Workload", ...]:
        """Workload of each trained model, the policy first."""
        if self.critic is None:
            return (self,)
        critic = Workload(
            architecture=self.critic, parallel=self.parallel, trainer=self.trainer, optimizer=self.optimizer
        )
        return replace(self, critic=None), critic

    def layers_of(self, stage: int) -> int:
        """Return the number of layers of a stage."""
        return sum(map(len, self.layout.stages[stage]))

    @property
    def item(self) -> int:
        return ITEM_BYTES[self.trainer.dtype]

    def expected(self, tokens: int) -> ExpectedMemory:
        """Return the memory of a step with micro-batches of `tokens` tokens."""
        return expected_memory(self, tokens)

    def alternatives(self) -> Iterator[tuple[str, "Workload"]]:
        """Yield settings that need less memory, each with its workload, cheapest first."""
        offloads = (False, True) if not (self.optimizer.cpu_offload or self.shared) else (None,)
        first = RECOMPUTES.index(self.trainer.recompute_granularity)
        for offload in offloads:
            for recompute in RECOMPUTES[first:]:
                changed = self.changed(recompute=recompute, cpu_offload=offload)
                if changed != self:
                    yield _changed_settings(self, changed), changed

    def changed(
        self, *, recompute: RecomputeGranularity | None = None, cpu_offload: bool | None = None
    ) -> "Workload":
        """Return the workload with another `recompute_granularity` or `optimizer.cpu_offload`."""
        trainer, optimizer = self.trainer, self.optimizer
        if recompute is not None:
            trainer = replace(trainer, recompute_granularity=recompute)
        if cpu_offload is not None:
            optimizer = replace(optimizer, cpu_offload=cpu_offload)
        return replace(self, trainer=trainer, optimizer=optimizer)


def _changed_settings(work: Workload, changed: Workload) -> str:
    names = []
    if changed.trainer != work.trainer:
        names.append(f'trainer.recompute_granularity = "{changed.trainer.recompute_granularity}"')
    if changed.optimizer != work.optimizer:
        names.append("optimizer.cpu_offload = true")
    return " and ".join(names)


def expected_memory(work: Workload, tokens: int) -> ExpectedMemory:
    """Return the memory of the rank with the highest peak.

    Args:
        work: workload of the run.
        tokens: tokens per micro-batch on each rank.
    """
    stages = range(work.parallel.pipeline_model_parallel_size)
    return max((_memory_of_models(work, tokens, stage) for stage in stages), key=lambda found: found.peak)


def _memory_of_models(work: Workload, tokens: int, stage: int) -> ExpectedMemory:
    """Return the memory of a rank of a pipeline stage with all models that it trains."""
    memories = [memory_of_stage(model, tokens, stage) for model in work.models]
    larger = max(memories, key=lambda one: one.activations + max(one.head, one.workspace))
    return replace(
        larger,
        parameters=sum(one.parameters for one in memories),
        gradients=sum(one.gradients for one in memories),
        optimizer=sum(one.optimizer for one in memories),
        update=max(one.update for one in memories),
        largest_offloaded=max(one.largest_offloaded for one in memories),
    )


def memory_of_stage(work: Workload, tokens: int, stage: int) -> ExpectedMemory:
    """Return the memory of a rank of a pipeline stage."""
    item, pp = work.item, work.layout.pp
    parameters = parameters_of_stage(work, stage)
    trained = _trained(work, stage)
    held = parameters + (trained if work.adapters.rank else 0) + (parameters if work.reference else 0)
    gradient_item = 4 if work.optimizer.grad_reduce_in_fp32 else item
    share = stepped_of_stage(work, stage)
    on_device = not work.optimizer.cpu_offload
    masters = 4 if item < 4 or work.shared else 0
    table = _output_table(work)
    last = stage == pp - 1
    tied_gradient = table * item if last and work.architecture.tied and not work.adapters.rank else 0
    most = max(_stored_bytes(work, tokens, chunk) for chunk in work.layout.stages[stage])
    return ExpectedMemory(
        parameters=held * item + sum(frozen_bytes(work, stage, offload=False)),
        gradients=trained * gradient_item,
        optimizer=share * (8 + masters) if on_device else 0,
        activations=most * in_flight_passes(work.layout, stage),
        head=_head(work, tokens, table) if last else 0,
        workspace=_layer_backward_bytes(work, tokens) + tied_gradient,
        update=share * 4 if on_device and gradient_item < 4 else 0,
        largest_offloaded=max(frozen_bytes(work, stage, offload=True), default=0),
    )


def frozen_layout(parallel: ParallelConfig) -> ParallelConfig:
    """Return the layout of a frozen model: the policy's, with layers split evenly over the stages."""
    return replace(parallel, num_layers_in_first_pipeline_stage=0, num_layers_in_last_pipeline_stage=0)


def frozen_bytes(work: Workload, stage: int, *, offload: bool) -> list[int]:
    """Return a rank's bytes of each frozen model whose `offload` equals the argument."""
    architectures = [shape.architecture for shape in work.frozen if shape.offload == offload]
    parallel = frozen_layout(work.parallel)
    return [sum(_sizes(a, Layout.of(parallel, a.layers), stage)) * work.item for a in architectures]


def _trained(work: Workload, stage: int) -> int:
    """Return the number of trained parameters of a rank."""
    return _adapter_parameters(work, stage) if work.adapters.rank else parameters_of_stage(work, stage)


def stepped_of_stage(work: Workload, stage: int) -> int:
    """Return the number of parameters that the optimizer of a rank of a pipeline stage updates."""
    trained = _trained(work, stage)
    if not work.parallel.use_distributed_optimizer:
        return trained
    experts = 0 if work.adapters.rank else expert_parameters_of_stage(work, stage)
    layout = work.layout
    copies = layout.stage_ranks // (layout.ep * layout.etp)
    return ceil((trained - experts) / (layout.dp * layout.cp)) + ceil(experts / copies)


def expert_parameters_of_stage(work: Workload, stage: int) -> int:
    """Return the number of expert parameters on a rank."""
    return _sizes(work.architecture, work.layout, stage)[0]


def parameters_of_stage(work: Workload, stage: int) -> int:
    """Return the number of parameters of a rank of a pipeline stage."""
    return sum(_sizes(work.architecture, work.layout, stage))


def in_flight_passes(layout: Layout, stage: int) -> int:
    """Return the maximum number of forward passes of a chunk whose activations a stage stores at a time.

    1F1B: one per stage from this stage on. Interleaved schedule: before its first backward pass, a stage runs
    a group of passes, one per stage, for every chunk except the last, plus two per stage after this stage.
    """
    after = layout.pp - stage - 1
    if layout.chunks == 1:
        return after + 1
    return (layout.chunks - 1) * layout.pp + 2 * after + 1


@functools.cache
def _sizes(architecture: Architecture, layout: Layout, stage: int) -> tuple[int, int]:
    """Return a rank's number of expert parameters and of other parameters."""
    found = [0, 0]
    for rule in stage_rules(architecture, layout, stage):
        found[not rule.expert] += prod(rule.local_shape(layout.grid(expert=rule.expert)))
    return found[0], found[1]


def bytes_of_layer(
    work: Workload,
    tokens: int,
    *,
    sparse: bool = False,
    delta: bool = False,
    without: tuple[str, ...] = (),
) -> int:
    """Return the bytes that a layer stores of a micro-batch.

    Args:
        work: workload of the run.
        tokens: tokens per micro-batch.
        sparse: whether the layer has experts.
        delta: whether the layer has a gated delta net.
        without: modules that are recomputed.
    """
    if not work.architecture.family.pre_norms:  # norms after attention and MLP are not recomputed
        without = tuple(name for name in without if name != "layernorm")
    seen = 0 if "core_attn" in without else _keys_seen(work, tokens)
    seen += _dropped_bytes(work, tokens)
    return seen + sum(
        ceil(tokens * row.elements(work.architecture) * (row.item_bytes or work.item) / _pieces(work, row))
        for row in activations_of(sparse=sparse, delta=delta)
        if not row.module or row.module not in without
    )


def _bytes_of_layers(
    work: Workload, tokens: int, layers: Sequence[int], *, without: tuple[str, ...] = ()
) -> list[int]:
    """Return the bytes that each of some layers stores."""
    a = work.architecture
    kinds = [(a.experts.is_sparse(layer), a.is_delta(layer)) for layer in layers]
    found = {
        (sparse, delta): bytes_of_layer(work, tokens, sparse=sparse, delta=delta, without=without)
        for sparse, delta in set(kinds)
    }
    return [found[kind] for kind in kinds]


def _stored_bytes(work: Workload, tokens: int, layers: Sequence[int]) -> int:
    """Return the bytes that a chunk stores of a micro-batch, including the recomputation of one piece.

    Args:
        work: workload of the run.
        tokens: tokens per micro-batch.
        layers: layers of the chunk.
    """
    trainer, a = work.trainer, work.architecture
    stream, layer_bytes = _stream(work, tokens), _bytes_of_layers(work, tokens, layers)
    whole = max(layer_bytes)
    angles = 2 * len(a.ropes) * tokens * a.positioned_dim * work.item
    ends = 2 * stream + angles  # input and output of the final norm
    if trainer.recompute_granularity == "full":
        pieces = trainer.recompute_num_layers
        if trainer.recompute_method == "uniform":
            return ends + ceil(len(layers) / pieces) * stream + min(pieces, len(layers)) * whole
        pieces = min(pieces, len(layers))
        return ends + pieces * stream + max((len(layers) - pieces) * whole, whole)
    if trainer.recompute_granularity == "selective":
        kept = _bytes_of_layers(work, tokens, layers, without=trainer.recompute_modules)
        return ends + sum(kept) + (whole - min(kept))
    return ends + sum(layer_bytes)


def _layer_backward_bytes(work: Workload, tokens: int) -> int:
    """Return the bytes of an MLP's backward pass: gradients of activations and of a weight.

    Gradients of activations include the product and its factors. Softcapped scores can need more. With
    context parallelism, so can the gradients of visible keys and values together with the gradients of the
    ranks' own.
    """
    a, tp = work.architecture, work.parallel.tensor_model_parallel_size
    gradients, width = mlp_projections(a) + 1, a.intermediate / tp
    experts, layout = a.experts, work.layout
    weight = mlp_projections(a) * a.intermediate * a.hidden // tp
    if experts.count:  # rows of experts count too, and the gradients of a rank's experts are stacked
        own = experts.per_token / _pieces(work, COMMON[0])
        rows = own * (gradients * experts.intermediate + 2 * a.hidden * layout.etp) / gradients
        width = max(width, rows)
        weight = max(weight, 2 * experts.intermediate * a.hidden * experts.count // (layout.ep * layout.etp))
    passing = ceil(tokens * gradients * width * work.item) + 2 * _stream(work, tokens)
    weights = 0 if work.adapters.rank else weight * work.item
    bounded = SCORE_COPIES * SCORES_CHUNK_BYTES if a.score_softcap else 0
    delta_rule = 2 * 4 * tokens * delta_rule_elements(a) // tp
    return max(passing + weights, bounded, delta_rule, 2 * _keys_seen(work, tokens))


def _keys_seen(work: Workload, tokens: int) -> int:
    """Return the bytes of keys and values that a context rank gathers or copies for its pieces.

    If one sequence fills a micro-batch, its last piece sees the whole sequence. The rank with the last of the
    2 C pieces also has the first, whose keys count twice.
    """
    a, ranks = work.architecture, work.parallel.context_parallel_size
    if ranks == 1:
        return 0
    sizes = a.kv_heads * (a.head_dim + a.value_dim)
    return ceil(tokens * (ranks + 0.5) * sizes * work.item / work.parallel.tensor_model_parallel_size)


def _head(work: Workload, tokens: int, table: int) -> int:
    """Return the bytes of the head if every token is trained: logits, and gradients of their inputs."""
    a, tp = work.architecture, work.parallel.tensor_model_parallel_size
    if a.value_head:  # reads float32 hidden states
        return 2 * tokens * a.hidden * 4
    logits = min(tokens * padded_vocabulary(a.vocabulary, tp) // tp * work.item, LOGITS_MOST_BYTES)
    weight = 0 if work.adapters.rank else table * work.item
    if weight and work.item < 4 and not work.optimizer.grad_reduce_in_fp32:
        weight += 4 * table  # the gradient is first summed in float32
    return logits + weight + 2 * tokens * a.hidden * work.item


def _output_table(work: Workload) -> int:
    tp = work.parallel.tensor_model_parallel_size
    return padded_vocabulary(work.architecture.vocabulary, tp) // tp * work.architecture.hidden


def _adapter_parameters(work: Workload, stage: int) -> int:
    """Return the number of parameters of this rank's adapters: A and B of each target of its layers."""
    return (
        work.layers_of(stage)
        * work.adapters.rank
        * sum(map(sum, adapted_sizes(work.architecture, work.adapters)))
    )


def _dropped_bytes(work: Workload, tokens: int) -> int:
    """Return the bytes of the adapters' inputs after dropout, with masks, that a layer stores."""
    width = (
        sum(inputs for inputs, _ in adapted_sizes(work.architecture, work.adapters))
        if work.adapters.dropout
        else 0
    )
    return tokens * width * (work.item + 1)


def _pieces(work: Workload, row: Activation) -> float:
    divided = row.split == "tensor" or work.parallel.sequence_parallel
    pieces = work.parallel.tensor_model_parallel_size if divided else 1
    return pieces / work.parallel.expert_tensor_parallel_size if row.split == "rows" else pieces


def _stream(work: Workload, tokens: int) -> int:
    """Return the bytes of the residual stream of a micro-batch."""
    return ceil(tokens * work.architecture.hidden * work.item / _pieces(work, COMMON[0]))

"""Computes from the settings what a rank will have on its device at the peak of a step. No torch here.

Shapes: H hidden size, F of the MLP, D of a head, A query heads, K key heads, V vocabulary; P tensor ranks.
Latent attention keeps keys of low rank and for all heads, and values in their own size and as wide as keys.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, prod

from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.megatron.architecture.numbers import Architecture
from trainer.megatron.convert.rules import padded_vocabulary
from trainer.megatron.layout import Layout
from trainer.megatron.reshard import stage_rules

GIB = 1 << 30
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
LIBRARIES = 64 << 20
"""Workspaces that cuBLAS takes from torch's allocator."""
HEAD_CHUNK_BYTES = 1 << 30
"""Size of a chunk of logits, and of those that are kept whole; as in `layers/head.py`, which needs torch."""


@dataclass(frozen=True, slots=True)
class Activation:
    """A tensor that each layer keeps of its forward pass for the backward pass."""

    name: str
    elements: Callable[[Architecture], int]
    """Elements of a token, over all tensor ranks."""
    module: str = ""
    """The entry of `recompute_modules` with which it is not kept; empty: it always is."""
    split: str = "tensor"
    """tensor: each tensor rank has its part; sequence: only with sequence parallelism; rows: likewise, and
    each rank that shares an expert has all rows of it."""
    item_bytes: int = 0
    """0: those of `trainer.dtype`."""


ACTIVATIONS = (
    Activation("input of the attention's norm, the residual stream", lambda a: a.hidden, split="sequence"),
    Activation("input of the projection to q, k, v", lambda a: a.hidden, "layernorm", "sequence"),
    Activation("what makes q, k, v, before and after its norms", lambda a: _low_ranks(a), split="sequence"),
    Activation("q, k, v together, of which v stays a view", lambda a: _projected(a)),
    Activation("q of its own, as a norm's input", lambda a: bool(a.qk_norm) * a.heads * a.head_dim),
    Activation("k of its own, likewise", lambda a: _over_heads(a) * a.kv_heads * a.head_dim),
    Activation(
        "q and k normed, before the norm's weight",
        lambda a: _over_heads(a) * (a.heads + a.kv_heads) * a.head_dim,
        item_bytes=4,
    ),
    Activation("q with rotation", lambda a: a.heads * a.head_dim),
    Activation("k with rotation", lambda a: a.kv_heads * a.head_dim),
    Activation("v as wide as k, and attention's output", lambda a: _widened(a)),
    Activation("log-sum-exp of the scores", lambda a: a.heads, "core_attn", item_bytes=4),
    Activation("attention's output, input of its projection", lambda a: a.heads * a.value_dim),
    Activation("input of the MLP's norm, the residual stream", lambda a: a.hidden, split="sequence"),
    Activation("input of the MLP", lambda a: a.hidden, "layernorm", "sequence"),
    Activation("gate and up, or what has no gate", lambda a: _wide(a) * a.intermediate, "mlp"),
    Activation("product, input of the projection down", lambda a: a.intermediate, "mlp"),
    Activation("inputs of the norms after", lambda a: _both_norms(a) * 2 * a.hidden, split="sequence"),
    Activation(
        "inputs of the norms before, in float32",
        lambda a: _in_float32(a) * a.family.pre_norms * 2 * a.hidden,
        "layernorm",
        "sequence",
        4,
    ),
    Activation(
        "inputs of the norms after, in float32",
        lambda a: _in_float32(a) * a.family.post_norms * 2 * a.hidden,
        split="sequence",
        item_bytes=4,
    ),
    Activation(
        "q and k in float32, as inputs of a norm",
        lambda a: _in_float32(a) * bool(a.qk_norm) * (a.heads + a.kv_heads) * a.head_dim,
        item_bytes=4,
    ),
)
"""What a layer keeps, first in the order in which it is made. With norms after attention and MLP instead of
before it is as much: inputs of these instead of outputs of those."""
EXPERT_ACTIVATIONS = (
    *(row for row in ACTIVATIONS if row.module != "mlp"),
    Activation("logits and scores of the router", lambda a: 2 * a.experts.count, "mlp", "sequence", 4),
    Activation("rows of experts", lambda a: a.experts.per_token * a.hidden, "mlp", "rows"),
    Activation("gate and up", lambda a: 2 * a.experts.per_token * a.experts.intermediate, "mlp", "sequence"),
    Activation("product", lambda a: a.experts.per_token * a.experts.intermediate, "mlp", "sequence"),
    Activation("outputs of experts", lambda a: a.experts.per_token * a.hidden, "mlp", "sequence"),
    Activation("those of the MLP for all tokens", lambda a: 3 * a.experts.shared_intermediate, "mlp"),
)
"""What a layer with experts keeps, if all ranks get as many rows."""
SCORES_BYTES = 3 << 28
"""Scores, their gradient and what is between, at a time, where they have a bound; as in
`layers/attention/softcapped.py`, which needs torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the memory of a rank depends on."""

    architecture: Architecture
    parallel: ParallelConfig
    trainer: TrainerConfig
    optimizer: OptimizerConfig
    adapters: LoraConfig = NO_ADAPTERS
    reference: bool = False
    """Whether a reference model is kept."""
    shared: bool = False
    """Whether an engine computes with the parameters, so that masters are apart in every dtype."""

    @property
    def layout(self) -> Layout:
        return Layout.of(self.parallel, self.architecture.layers)

    def layers_of(self, stage: int) -> int:
        """Return how many layers a stage has."""
        return sum(map(len, self.layout.stages[stage]))

    def sparse_layers_of(self, stage: int) -> int:
        """Return how many of them have experts."""
        numbers = (layer for chunk in self.layout.stages[stage] for layer in chunk)
        return sum(map(self.architecture.experts.is_sparse, numbers))

    @property
    def item(self) -> int:
        return ITEM_BYTES[self.trainer.dtype]

    def changed(self, *, recompute: str | None = None, cpu_offload: bool | None = None) -> "Workload":
        """Return the workload with another `recompute_granularity` or `optimizer.cpu_offload`."""
        trainer, optimizer = self.trainer, self.optimizer
        if recompute is not None:
            trainer = dataclasses.replace(trainer, recompute_granularity=recompute)
        if cpu_offload is not None:
            optimizer = dataclasses.replace(optimizer, cpu_offload=cpu_offload)
        return dataclasses.replace(self, trainer=trainer, optimizer=optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedMemory:
    """Bytes on the device of one rank, by what they are for."""

    parameters: int
    """With those of the reference model."""
    gradients: int
    optimizer: int
    """Masters and moments."""
    activations: int
    """What forward passes keep."""
    head: int
    """Logits and their gradient."""
    workspace: int
    """What the backward pass of a layer takes for a moment."""
    update: int
    """What the optimizer takes for a moment, after the passes."""

    @property
    def peak(self) -> int:
        """The largest sum at one moment of a step."""
        passes = self.activations + max(self.head, self.workspace)
        return self.parameters + self.gradients + self.optimizer + LIBRARIES + max(passes, self.update)

    def __str__(self) -> str:
        kinds = ("parameters", "gradients", "optimizer", "activations", "head", "workspace")
        parts = ", ".join(f"{kind} {getattr(self, kind) / GIB:.2f}" for kind in kinds)
        return f"{self.peak / GIB:.1f} GiB ({parts})"


def expected_memory(work: Workload, tokens: int) -> ExpectedMemory:
    """Return the memory of the rank that takes the most.

    Args:
        work: the run.
        tokens: of a micro-batch.
    """
    stages = range(work.parallel.pipeline_model_parallel_size)
    return max((memory_of_stage(work, tokens, stage) for stage in stages), key=lambda found: found.peak)


def memory_of_stage(work: Workload, tokens: int, stage: int) -> ExpectedMemory:
    """Return the memory of a rank of a pipeline stage."""
    item, pp = work.item, work.layout.pp
    parameters = parameters_of_stage(work, stage)
    trained = _adapter_parameters(work, stage) if work.adapters.rank else parameters
    held = parameters + (trained if work.adapters.rank else 0) + (parameters if work.reference else 0)
    gradient_item = 4 if work.optimizer.grad_reduce_in_fp32 else item
    share = _stepped(work, stage, trained) if work.parallel.use_distributed_optimizer else trained
    on_device = not work.optimizer.cpu_offload
    masters = 4 if item < 4 or work.shared else 0
    table = _output_table(work)
    last = stage == pp - 1
    tied_gradient = table * item if last and work.architecture.tied and not work.adapters.rank else 0
    return ExpectedMemory(
        parameters=held * item,
        gradients=trained * gradient_item,
        optimizer=share * (8 + masters) if on_device else 0,
        activations=_kept(work, tokens, stage) * (pp - stage),  # micro-batches under way in 1F1B
        head=_head(work, tokens, table) if last else 0,
        workspace=_of_layer_backward(work, tokens) + tied_gradient,
        update=share * 4 if on_device and gradient_item < 4 else 0,
    )


def _stepped(work: Workload, stage: int, trained: int) -> int:
    """Return how many of its trained parameters a rank steps, where ranks with the same ones share them."""
    experts = 0 if work.adapters.rank else expert_parameters_of_stage(work, stage)
    layout = work.layout
    copies = layout.stage_ranks // (layout.ep * layout.etp)
    return ceil((trained - experts) / layout.dp) + ceil(experts / copies)


def expert_parameters_of_stage(work: Workload, stage: int) -> int:
    """Return those of a rank's parameters that are experts'."""
    return _sizes(work.architecture, work.layout, stage)[0]


def parameters_of_stage(work: Workload, stage: int) -> int:
    """Return the number of parameters of a rank of a pipeline stage."""
    return sum(_sizes(work.architecture, work.layout, stage))


@functools.cache
def _sizes(architecture: Architecture, layout: Layout, stage: int) -> tuple[int, int]:
    """Return how many parameters of a rank are experts', and how many are not."""
    found = [0, 0]
    for rule in stage_rules(architecture, layout, stage):
        found[not rule.expert] += prod(rule.local_shape(layout.grid(expert=rule.expert)))
    return found[0], found[1]


def bytes_of_layer(
    work: Workload, tokens: int, *, sparse: bool = False, without: tuple[str, ...] = ()
) -> int:
    """Return the bytes that a layer keeps of a micro-batch.

    Args:
        work: the run.
        tokens: of the micro-batch.
        sparse: whether the layer has experts.
        without: modules that are recomputed.
    """
    if not work.architecture.family.pre_norms:  # those after are not computed again
        without = tuple(name for name in without if name != "layernorm")
    return sum(
        ceil(tokens * row.elements(work.architecture) * (row.item_bytes or work.item) / _pieces(work, row))
        for row in (EXPERT_ACTIVATIONS if sparse else ACTIVATIONS)
        if not row.module or row.module not in without
    )


def _bytes_of_layers(work: Workload, tokens: int, stage: int, *, without: tuple[str, ...] = ()) -> int:
    """Return the bytes that all layers of a stage keep."""
    sparse = work.sparse_layers_of(stage)
    kinds = ((False, work.layers_of(stage) - sparse), (True, sparse))
    return sum(
        count * bytes_of_layer(work, tokens, sparse=kind, without=without) for kind, count in kinds if count
    )


def _kept(work: Workload, tokens: int, stage: int) -> int:
    """Return the bytes that layers keep of a micro-batch, and what recomputing one piece of them takes."""
    trainer, a = work.trainer, work.architecture
    layers = work.layers_of(stage)
    sparse, stream = work.sparse_layers_of(stage), _stream(work, tokens)
    whole = max(
        bytes_of_layer(work, tokens, sparse=kind)
        for kind, count in ((False, layers - sparse), (True, sparse))
        if count
    )
    angles = 2 * len(a.ropes) * tokens * a.positioned_dim * work.item
    ends = 2 * stream + angles  # the last norm's input and output
    if trainer.recompute_granularity == "full":
        pieces = trainer.recompute_num_layers
        if trainer.recompute_method == "uniform":
            return ends + ceil(layers / pieces) * stream + min(pieces, layers) * whole
        pieces = min(pieces, layers)
        return ends + pieces * stream + max((layers - pieces) * whole, whole)
    if trainer.recompute_granularity == "selective":
        kept = _bytes_of_layers(work, tokens, stage, without=trainer.recompute_modules)
        least = bytes_of_layer(work, tokens, sparse=sparse > 0, without=trainer.recompute_modules)
        return ends + kept + (whole - least)
    return ends + _bytes_of_layers(work, tokens, stage)


def _of_layer_backward(work: Workload, tokens: int) -> int:
    """Return the bytes that the backward pass of an MLP takes: gradients of activations and of a weight.

    Those of activations are of the product and of what it is made of. Bounded scores can take more.
    """
    a, tp = work.architecture, work.parallel.tensor_model_parallel_size
    gradients, width = _wide(a) + 1, a.intermediate / tp
    experts, layout = a.experts, work.layout
    weight = _wide(a) * a.intermediate * a.hidden // tp
    if experts.count:  # rows of experts pass, too, and the gradients of a rank's experts are a stack
        own = experts.per_token / _pieces(work, ACTIVATIONS[0])
        rows = own * (gradients * experts.intermediate + 2 * a.hidden * layout.etp) / gradients
        width = max(width, rows)
        weight = max(weight, 2 * experts.intermediate * a.hidden * experts.count // (layout.ep * layout.etp))
    passing = ceil(tokens * gradients * width * work.item) + 2 * _stream(work, tokens)
    weights = 0 if work.adapters.rank else weight * work.item
    return max(passing + weights, SCORES_BYTES if a.score_softcap else 0)


def _head(work: Workload, tokens: int, table: int) -> int:
    """Return the bytes of the head if every token is trained: logits, gradients of what made them."""
    a, tp = work.architecture, work.parallel.tensor_model_parallel_size
    logits = tokens * padded_vocabulary(a.vocabulary, tp) // tp * work.item
    if logits > HEAD_CHUNK_BYTES:  # the next chunk is computed while the one before is still there
        logits = 2 * HEAD_CHUNK_BYTES
    weight = 0 if work.adapters.rank else table * work.item
    if weight and work.item < 4 and not work.optimizer.grad_reduce_in_fp32:
        weight += 4 * table  # it is added up in float32 first
    return logits + weight + 2 * tokens * a.hidden * work.item


def _output_table(work: Workload) -> int:
    tp = work.parallel.tensor_model_parallel_size
    return padded_vocabulary(work.architecture.vocabulary, tp) // tp * work.architecture.hidden


def _adapter_parameters(work: Workload, stage: int) -> int:
    """Return the parameters of this rank's adapters: A and B of each target of its layers."""
    a, adapters = work.architecture, work.adapters
    q, k = a.heads * a.head_dim, a.kv_heads * a.head_dim
    sizes = {
        "q_proj": a.hidden + q,
        "k_proj": a.hidden + k,
        "v_proj": a.hidden + k,
        "o_proj": q + a.hidden,
        "gate_proj": a.hidden + a.intermediate,
        "up_proj": a.hidden + a.intermediate,
        "down_proj": a.intermediate + a.hidden,
        "c_fc": a.hidden + a.intermediate,
        "c_proj": a.intermediate + a.hidden,
    }
    if low := a.latent:
        sizes["o_proj"] = a.heads * low.value + a.hidden
        sizes["q_b_proj"] = low.query_rank + q
        sizes["kv_b_proj"] = low.kv_rank + a.heads * (low.nope + low.value)
    chosen = sum(size for name, size in sizes.items() if name in adapters.target_modules)
    return work.layers_of(stage) * adapters.rank * chosen


def _heads(a: Architecture) -> int:
    return a.heads + 2 * a.kv_heads


def _projected(a: Architecture) -> int:
    """Return the elements of what the projections put out, in so far as a part of it is kept as it is."""
    return a.heads * (a.latent.nope + a.latent.value) if a.latent else _heads(a) * a.head_dim


def _low_ranks(a: Architecture) -> int:
    return 2 * (a.latent.query_rank + a.latent.kv_rank) + a.latent.rope if a.latent else 0


def _widened(a: Architecture) -> int:
    return 2 * a.heads * a.head_dim if a.latent else 0


def _wide(a: Architecture) -> int:
    """Return how many projections lead into an MLP."""
    return 2 if a.family.gated else 1


def _both_norms(a: Architecture) -> bool:
    return a.family.pre_norms and a.family.post_norms


def _in_float32(a: Architecture) -> bool:
    """Return whether norms compute with float32 copies of their inputs."""
    return a.family.norm == "rms_from_one"


def _over_heads(a: Architecture) -> bool:
    return a.qk_norm == "projection"


def _pieces(work: Workload, row: Activation) -> float:
    divided = row.split == "tensor" or work.parallel.sequence_parallel
    pieces = work.parallel.tensor_model_parallel_size if divided else 1
    return pieces / work.parallel.expert_tensor_parallel_size if row.split == "rows" else pieces


def _stream(work: Workload, tokens: int) -> int:
    """Return the bytes of the residual stream of a micro-batch."""
    return ceil(tokens * work.architecture.hidden * work.item / _pieces(work, ACTIVATIONS[0]))

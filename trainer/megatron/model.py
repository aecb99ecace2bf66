"""Builds a megatron GPTModel for one rank, with a custom layer spec, without TransformerEngine and Apex.

Shapes: T tokens of a micro-batch, H hidden size, P tensor ranks; megatron's activations are [T, 1, H].
"""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from protocol.errors import SettingsError
from trainer.config import ParallelConfig
from trainer.megatron.convert.rules import padded_vocabulary
from trainer.megatron.families.experts import Experts
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.layers.attention.core import PackedAttention
from trainer.megatron.layers.attention.rotary import Rotary
from trainer.megatron.layers.dense import NORMS, ValueHead
from trainer.megatron.layers.spec import layer_spec
from trainer.megatron.layers.tensor_parallel import install_weight_gradients, skip_collectives
from trainer.megatron.layout import Layout
from trainer.megatron.parallel import Position

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PackedModel(GPTModel):
    """Shard of the model on this rank. In training, the last stage returns hidden states without logits.

    A training pass gets rotary angles in `packed_seq_params`. With an inference context, which then contains
    the angles, the pass is megatron's own and returns logits.
    """

    rotaries: tuple[Rotary, ...]
    """Rotary embeddings of `Architecture.ropes`."""
    embedding_scale: float
    logit_softcap: float
    value_head: ValueHead
    """Replaces the output layer on the last stage of a critic."""

    @property
    def output_weight(self) -> torch.Tensor:
        """This rank's rows of the output layer, [V' / P, H], where V' is the padded vocabulary."""
        weight: torch.Tensor = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        return weight

    @property
    def output_bias(self) -> torch.Tensor | None:
        """This rank's biases of the output layer, [V' / P]; None without biases."""
        bias: torch.Tensor | None = self.output_layer.bias
        return bias

    def _preprocess(self, input_ids: torch.Tensor, *, inference_context: Any = None, **others: Any) -> Any:
        hidden = None
        if self.pre_process:
            hidden = self.embedding(input_ids=input_ids, position_ids=None)
            if inference_context is None:
                # With the strides of a transposed [1, T, H] and a frozen weight, torch would compute T
                # one-row products.
                hidden = hidden[:, 0].unsqueeze(1)
            if self.embedding_scale != 1.0:
                hidden = hidden * self.embedding_scale
        return hidden, None, None, None, None, None

    def _postprocess(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        if others["inference_context"] is None:
            return hidden_states
        logits: torch.Tensor = super()._postprocess(hidden_states, **others)
        cap = self.logit_softcap
        return (logits.float() / cap).tanh() * cap if cap else logits


def transformer_config(
    architecture: Architecture, position: Position, dtype: torch.dtype
) -> TransformerConfig:
    """Return megatron's configuration of the model.

    Raises:
        SettingsError: megatron refuses the combination of model and layout.
    """
    parallel, experts = position.config, architecture.experts
    install_weight_gradients()
    try:
        return TransformerConfig(
            num_layers=architecture.layers,
            hidden_size=architecture.hidden,
            ffn_hidden_size=architecture.intermediate,
            **_attention_fields(architecture),
            layernorm_epsilon=architecture.norm_eps,
            normalization="RMSNorm",
            gated_linear_unit=architecture.family.gated,
            activation_func=torch.nn.functional.silu,  # unused: `MLPS` have their own activations
            add_bias_linear="mlp" in architecture.biases,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            **pipeline_fields(parallel),
            context_parallel_size=parallel.context_parallel_size,
            sequence_parallel=position.sequence_parallel,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            # Micro-batches differ in length; this expert dispatcher supports variable lengths.
            variable_seq_lengths=parallel.pipeline_model_parallel_size > 1,
            moe_token_dispatcher_type="alltoall",
            **_expert_fields(experts, parallel),
            bf16=dtype is torch.bfloat16,
            fp16=dtype is torch.float16,
            # Weights are loaded from a checkpoint, so random initialization is unnecessary.
            perform_initialization=False,
            use_cpu_initialization=position.device.type == "cpu",
            # The loss of a step is a plain sum, not divided by micro-batches or ranks.
            calculate_per_token_loss=True,
            cuda_graph_scope=[],
            gradient_accumulation_fusion=True,
        )
    except (ValueError, AssertionError) as error:
        raise SettingsError(f"megatron-core refuses this model in this layout: {error}") from error


def _attention_fields(architecture: Architecture) -> dict[str, Any]:
    """Return the attention fields of megatron's configuration."""
    return {
        "num_attention_heads": architecture.heads,
        "num_query_groups": architecture.kv_heads,
        "kv_channels": architecture.head_dim,
        "add_qkv_bias": architecture.qkv_bias,
        # If set, megatron sums the norms' gradients over tensor ranks, which requires equal weights on all.
        "qk_layernorm": architecture.qk_norm == "head",
        "attention_output_gate": architecture.family.output_gate,
    }


def _expert_fields(experts: Experts, parallel: ParallelConfig) -> dict[str, Any]:
    """Return the expert fields of megatron's configuration; empty without experts."""
    if not experts.count:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.intermediate,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": True,
        "moe_router_dtype": "fp32",
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
    }


def pipeline_fields(parallel: ParallelConfig) -> dict[str, Any]:
    """Return the pipeline fields of megatron's configuration."""
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    fields: dict[str, Any] = {
        "pipeline_model_parallel_size": pp,
        "num_layers_in_first_pipeline_stage": first or None,
        # With two stages the last follows from the first; given both, megatron would divide by zero stages.
        "num_layers_in_last_pipeline_stage": (last or None) if pp > 2 or not first else None,
    }
    if vpp > 1:
        # With batched communication, megatron receives from the previous stage first, and from the next stage
        # last. With two stages both are the same rank, and activations would be mistaken for gradients.
        fields |= {
            "virtual_pipeline_model_parallel_size": vpp,
            "batch_p2p_comm": False,
            "overlap_p2p_comm": True,
        }
    return fields


def build_model(
    architecture: Architecture,
    config: TransformerConfig,
    position: Position,
    *,
    chunk: int = 0,
    attention: type[Any] | None = None,
    core_attention: type[Any] = PackedAttention,
) -> PackedModel:
    """Build a chunk of this rank's model shard, with uninitialized weights.

    A collective: every rank calls it, for its chunks in order.

    Args:
        architecture: architecture of the whole model.
        config: result of `transformer_config`.
        position: this rank's position in the layout.
        chunk: index of the chunk; 0 unless the pipeline is virtual.
        attention: class of self-attention for generation; None for training.
        core_attention: class of the core attention.
    """
    chunks = Layout.of(position.config, architecture.layers).stages[position.place.pp]
    block = TransformerBlockSubmodules(
        layer_specs=[layer_spec(architecture, layer, attention, core_attention) for layer in chunks[chunk]],
        layer_norm=NORMS[architecture.family.norm],
    )
    model = PackedModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=padded_vocabulary(architecture.vocabulary, config.tensor_model_parallel_size),
        max_sequence_length=architecture.max_positions,
        pre_process=position.first_stage and chunk == 0,
        post_process=position.last_stage and chunk == len(chunks) - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="none",  # for megatron; attention applies `rotaries`
        vp_stage=chunk if len(chunks) > 1 else None,
    )
    if config.tensor_model_parallel_size == 1:
        skip_collectives(model)
    model.rotaries = tuple(
        Rotary.of(rope, architecture.positioned_dim, position.device) for rope in architecture.ropes
    )
    if model.post_process:
        _change_output(model, architecture, config.params_dtype, position.device)
    # transformers also rounds the scale to the dtype of the weights
    model.embedding_scale = torch.tensor(architecture.embedding_scale, dtype=config.params_dtype).item()
    model.logit_softcap = architecture.logit_softcap
    return model.to(position.device)


def _change_output(
    model: PackedModel, architecture: Architecture, dtype: torch.dtype, device: torch.device
) -> None:
    """Add the output bias that megatron's layer lacks, or replace the output layer by a value head."""
    if architecture.output_bias:
        bias = torch.empty(model.output_layer.output_size_per_partition, dtype=dtype, device=device)
        model.output_layer.bias = torch.nn.Parameter(bias)
    if architecture.value_head:
        del model.output_layer
        model.value_head = ValueHead(architecture.hidden, dtype, device)


def whole_part(chunks: Sequence[torch.nn.Module]) -> torch.nn.Module:
    """Return a rank's chunks as one module, with the parameter names of `stage_rules`."""
    if len(chunks) == 1:
        return chunks[0]
    part = torch.nn.Module()
    part.chunks = torch.nn.ModuleList(chunks)
    return part


FREQUENCIES = "rotary_pos_emb.inv_freq"
"""Buffer name of the first rotary embedding's frequencies; the others append their index."""


def buffers_of(model: PackedModel) -> dict[str, torch.Tensor]:
    """Return the model's buffers and its rotary frequencies, which are plain attributes."""
    frequencies = {}
    for number, rotary in enumerate(model.rotaries):
        name = FREQUENCIES + (f".{number}" if number else "")
        frequencies[name] = rotary.frequencies
        if rotary.long is not None:
            frequencies[f"{name}.long"] = rotary.long
    return {**dict(model.named_buffers()), **frequencies}

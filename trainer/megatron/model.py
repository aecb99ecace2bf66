"""Builds a megatron GPTModel for one rank, with layers of our own spec, and describes its memory.

Shapes: T tokens of a micro-batch, H hidden size, P tensor ranks; megatron's activations are [T, 1, H].

TransformerEngine and Apex are not needed.
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
    """This rank's part of the model, whose last stage ends with hidden states, before the output layer.

    A forward pass takes `packed_seq_params`, which hold the rotary angles. With an inference context, which
    holds them then, it is megatron's own pass, to the logits.
    """

    rotaries: tuple[Rotary, ...]
    """Embeddings of `Architecture.ropes`."""
    embedding_scale: float
    logit_softcap: float
    value_head: ValueHead
    """In the place of the output layer, on the last stage of a critic."""

    @property
    def output_weight(self) -> torch.Tensor:
        """This rank's rows of the output layer, [V' / P, H], V' being the padded vocabulary."""
        weight: torch.Tensor = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        return weight

    @property
    def output_bias(self) -> torch.Tensor | None:
        """This rank's biases of the output layer, [V' / P]; None if it has none."""
        bias: torch.Tensor | None = self.output_layer.bias
        return bias

    def _preprocess(self, input_ids: torch.Tensor, *, inference_context: Any = None, **others: Any) -> Any:
        hidden = None
        if self.pre_process:
            hidden = self.embedding(input_ids=input_ids, position_ids=None)
            if inference_context is None:
                # With the strides of a transposed [1, T, H] torch makes T products of one row each, where the
                # weight is frozen.
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
    """Return the model's configuration in megatron's terms.

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
            activation_func=torch.nn.functional.silu,  # of no effect: `MLPS` have their own
            add_bias_linear="mlp" in architecture.biases,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            **pipeline_fields(parallel),
            context_parallel_size=parallel.context_parallel_size,
            sequence_parallel=position.sequence_parallel,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            # Micro-batches differ in length; the dispatcher, of experts, is one that megatron allows then.
            variable_seq_lengths=parallel.pipeline_model_parallel_size > 1,
            moe_token_dispatcher_type="alltoall",
            **_expert_fields(experts, parallel),
            bf16=dtype is torch.bfloat16,
            fp16=dtype is torch.float16,
            # Weights come from a checkpoint: a random initialization would be wasted.
            perform_initialization=False,
            use_cpu_initialization=position.device.type == "cpu",
            # The step's loss is a plain sum: no division by micro-batches or ranks.
            calculate_per_token_loss=True,
            cuda_graph_scope=[],
            gradient_accumulation_fusion=True,
        )
    except (ValueError, AssertionError) as error:
        raise SettingsError(f"megatron-core refuses this model in this layout: {error}") from error


def _attention_fields(architecture: Architecture) -> dict[str, Any]:
    """Return the fields of megatron's configuration that describe attention."""
    return {
        "num_attention_heads": architecture.heads,
        "num_query_groups": architecture.kv_heads,
        "kv_channels": architecture.head_dim,
        "add_qkv_bias": architecture.qkv_bias,
        # With it megatron adds up the norms' gradients over tensor ranks, as if all had the same weights.
        "qk_layernorm": architecture.qk_norm == "head",
        "attention_output_gate": architecture.family.output_gate,
    }


def _expert_fields(experts: Experts, parallel: ParallelConfig) -> dict[str, Any]:
    """Return the fields of megatron's configuration that say how experts are divided; empty: no experts."""
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
    """Return the fields of megatron's configuration that say how layers are divided into stages."""
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    fields: dict[str, Any] = {
        "pipeline_model_parallel_size": pp,
        "num_layers_in_first_pipeline_stage": first or None,
        # With two stages it follows from the first; with both megatron divides by no stages between.
        "num_layers_in_last_pipeline_stage": (last or None) if pp > 2 or not first else None,
    }
    if vpp > 1:
        # In a batch of messages megatron receives from the stage before first and from the one after last, as
        # it sends. With two stages both are the same rank, and activations would be taken for gradients.
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
    """Build a chunk of this rank's part of the model, with uninitialized weights.

    A collective: every rank calls it, for its chunks in their order.

    Args:
        architecture: the whole model's.
        config: what `transformer_config` returns.
        position: this rank's place in the layout.
        chunk: number of the chunk; there is one, unless the pipeline is virtual.
        attention: class of self-attention, None for training; generation has one of its own, and also of
        core_attention: what computes the attention itself.
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
        position_embedding_type="none",  # to megatron; attention rotates by `rotaries`
        vp_stage=chunk if len(chunks) > 1 else None,
    )
    if config.tensor_model_parallel_size == 1:
        skip_collectives(model)
    model.rotaries = tuple(
        Rotary.of(rope, architecture.positioned_dim, position.device) for rope in architecture.ropes
    )
    if model.post_process:
        _change_output(model, architecture, config.params_dtype, position.device)
    # As transformers does, in the dtype of the weights.
    model.embedding_scale = torch.tensor(architecture.embedding_scale, dtype=config.params_dtype).item()
    model.logit_softcap = architecture.logit_softcap
    return model.to(position.device)


def _change_output(
    model: PackedModel, architecture: Architecture, dtype: torch.dtype, device: torch.device
) -> None:
    """Give the output layer a bias, which megatron builds without one, or put a critic's in its place."""
    if architecture.output_bias:
        bias = torch.empty(model.output_layer.output_size_per_partition, dtype=dtype, device=device)
        model.output_layer.bias = torch.nn.Parameter(bias)
    if architecture.value_head:
        del model.output_layer
        model.value_head = ValueHead(architecture.hidden, dtype, device)


def whole_part(chunks: Sequence[torch.nn.Module]) -> torch.nn.Module:
    """Return a rank's chunks as one module, whose parameters have the names of `stage_rules`."""
    if len(chunks) == 1:
        return chunks[0]
    part = torch.nn.Module()
    part.chunks = torch.nn.ModuleList(chunks)
    return part


FREQUENCIES = "rotary_pos_emb.inv_freq"
"""Name of the first rotary embedding's; the others have their number behind it."""


def buffers_of(model: PackedModel) -> dict[str, torch.Tensor]:
    """Return the model's buffers, with the rotary frequencies, which are attributes."""
    frequencies = {}
    for number, rotary in enumerate(model.rotaries):
        name = FREQUENCIES + (f".{number}" if number else "")
        frequencies[name] = rotary.frequencies
        if rotary.long is not None:
            frequencies[f"{name}.long"] = rotary.long
    return {**dict(model.named_buffers()), **frequencies}

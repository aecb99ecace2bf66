"""Builds a megatron GPTModel for one rank, with layers of our own spec: no TransformerEngine, no Apex.

Shapes: T tokens of a micro-batch, H hidden size, P tensor ranks; megatron's activations are [T, 1, H].
"""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from protocol.errors import SettingsError
from trainer.megatron.architecture import Architecture
from trainer.megatron.convert.rules import Direct, Rule, padded_vocabulary
from trainer.megatron.layers import weight_gradients
from trainer.megatron.layers.attention import PackedAttention
from trainer.megatron.layers.dense import ProjectionNorm, RMSNorm, SwigluMLP
from trainer.megatron.layers.rotary import inverse_frequencies
from trainer.megatron.parallel import Position

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PackedModel(GPTModel):
    """This rank's part of the model, whose last stage ends with hidden states, before the output layer.

    A forward pass takes `packed_seq_params`, which hold the rotary angles. With an inference context it is
    megatron's own pass, to the logits.
    """

    @property
    def output_weight(self) -> torch.Tensor:
        """This rank's rows of the output layer, [V' / P, H], V' being the padded vocabulary."""
        weight: torch.Tensor = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        return weight

    def _preprocess(self, input_ids: torch.Tensor, *, inference_context: Any = None, **others: Any) -> Any:
        if inference_context is not None:
            return super()._preprocess(input_ids, inference_context=inference_context, **others)
        hidden = None
        if self.pre_process:
            # A transposed [1, T, H] has strides of which torch makes T products of one row each, where the
            # weight is frozen.
            hidden = self.embedding(input_ids=input_ids, position_ids=None)[:, 0].unsqueeze(1)
        return hidden, None, None, None, None, None

    def _postprocess(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        if others["inference_context"] is None:
            return hidden_states
        logits: torch.Tensor = super()._postprocess(hidden_states, **others)
        return logits


class PostNormLayer(TransformerLayer):
    """A layer that norms what attention and MLP put out, before it is added to the residual stream."""

    def __init__(self, config: TransformerConfig, **others: Any) -> None:
        super().__init__(config=config, **others)
        size, eps = config.hidden_size, config.layernorm_epsilon
        self.post_attention_layernorm = RMSNorm(config, size, eps)
        self.post_mlp_layernorm = RMSNorm(config, size, eps)
        self.self_attn_bda = partial(_residual, norm=self.post_attention_layernorm)
        self.mlp_bda = partial(_residual, norm=self.post_mlp_layernorm)


def transformer_config(
    architecture: Architecture, position: Position, dtype: torch.dtype
) -> TransformerConfig:
    """Return the model's configuration in megatron's terms.

    Raises:
        SettingsError: megatron refuses the combination of model and layout.
    """
    parallel = position.config
    weight_gradients.install()
    try:
        return TransformerConfig(
            num_layers=architecture.layers,
            hidden_size=architecture.hidden,
            ffn_hidden_size=architecture.intermediate,
            num_attention_heads=architecture.heads,
            num_query_groups=architecture.kv_heads,
            kv_channels=architecture.head_dim,
            layernorm_epsilon=architecture.norm_eps,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            add_qkv_bias=architecture.qkv_bias,
            # With it megatron adds up the norms' gradients over tensor ranks, as if all had the same weights.
            qk_layernorm=architecture.qk_norm == "head",
            softmax_scale=_scale(architecture),
            window_size=(architecture.window - 1, 0) if architecture.window else None,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            sequence_parallel=position.sequence_parallel,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            # Micro-batches differ in length; the dispatcher, of experts, is one that megatron allows then.
            variable_seq_lengths=parallel.pipeline_model_parallel_size > 1,
            moe_token_dispatcher_type="alltoall",
            bf16=dtype is torch.bfloat16,
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


def build_model(
    architecture: Architecture,
    config: TransformerConfig,
    position: Position,
    *,
    attention: type[Any] = SelfAttention,
    core_attention: type[Any] = PackedAttention,
) -> PackedModel:
    """Build this rank's part of the model, with uninitialized weights. A collective: every rank calls it.

    Args:
        architecture: the whole model's.
        config: what `transformer_config` returns.
        position: this rank's place in the layout.
        attention: class of the layers' self-attention; generation has one of its own, and also of
        core_attention: what computes the attention itself.
    """
    stages = architecture.layers // config.pipeline_model_parallel_size
    block = TransformerBlockSubmodules(
        layer_specs=[_layer_spec(architecture, attention, core_attention)] * stages,
        layer_norm=RMSNorm,
    )
    model = PackedModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=padded_vocabulary(architecture.vocabulary, config.tensor_model_parallel_size),
        max_sequence_length=architecture.max_positions,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="rope",
        rotary_base=architecture.rope.theta,
    )
    # Ours: megatron's scaling is llama3's with two of its four numbers fixed.
    frequencies = inverse_frequencies(architecture.rope, architecture.head_dim)
    model.rotary_pos_emb.inv_freq = frequencies.to(position.device)
    if config.params_dtype is torch.bfloat16:
        model = model.bfloat16()
    return model.to(position.device)


def mark_split(parameters: Mapping[str, torch.Tensor], rules: Iterable[Rule]) -> None:
    """Mark the parameters that are split over tensor ranks.

    So gradient norms count them on every rank, and replicated ones once. megatron does this while it
    initializes weights at random, which is left out here.
    """
    for rule in rules:
        parameter = parameters[rule.parameter]
        if not isinstance(rule, Direct) and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=rule.dim, stride=1)


def _scale(architecture: Architecture) -> float | None:
    """Return the scale of the scores; None: 1 / sqrt(D).

    A factor of rotated queries and of keys is its square in their products.
    """
    factor = architecture.rope.attention_factor
    return None if factor == 1.0 else factor**2 / math.sqrt(architecture.head_dim)


def _layer_spec(architecture: Architecture, attention: type[Any], core_attention: type[Any]) -> ModuleSpec:
    post_norms = architecture.family.post_norms
    projections = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=core_attention,
        linear_proj=RowParallelLinear,
        q_layernorm=_head_norm(architecture.qk_norm, architecture.heads),
        k_layernorm=_head_norm(architecture.qk_norm, architecture.kv_heads),
    )
    return ModuleSpec(
        module=PostNormLayer if post_norms else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp if post_norms else RMSNorm,
            self_attention=ModuleSpec(
                module=attention, params={"attn_mask_type": AttnMaskType.causal}, submodules=projections
            ),
            self_attn_bda=_residual,
            pre_mlp_layernorm=IdentityOp if post_norms else RMSNorm,
            mlp=SwigluMLP,
            mlp_bda=_residual,
        ),
    )


def _head_norm(kind: str, heads: int) -> Any:
    if kind == "projection":
        return ModuleSpec(module=ProjectionNorm, params={"heads": heads})
    return RMSNorm if kind == "head" else IdentityOp


def _residual(training: bool, fused: bool, norm: RMSNorm | None = None) -> Any:
    """Return megatron's bias-dropout-add without the dropout, which the models here never have.

    With a `norm`, what is added to the residual stream goes through it.
    """

    def add(
        output_and_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, probability: float
    ) -> torch.Tensor:
        output, bias = output_and_bias
        added = output if bias is None else output + bias
        return residual + (added if norm is None else norm(added))

    return add

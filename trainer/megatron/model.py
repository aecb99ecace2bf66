"""Builds a megatron GPTModel for one rank, with layers of our own spec: no TransformerEngine, no Apex.

Shapes: S tokens of a sequence, B sequences, H hidden size, P tensor ranks; megatron's activations are [S, B,
H].
"""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
import math
from collections.abc import Iterable, Mapping
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
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from protocol.errors import SettingsError
from trainer.megatron.architecture import Architecture, Rope
from trainer.megatron.convert.rules import Direct, Rule, padded_vocabulary
from trainer.megatron.parallel import Position

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RMSNorm(torch.nn.Module):
    """Root mean square norm over the last dimension, which sequence-parallel regions may contain.

    There each tensor rank has only its tokens; the mark on the weight, which megatron's own norm lacks, makes
    megatron add up its gradient over the ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)


class CausalAttention(MegatronModule):
    """Attention on torch's own kernels.

    Sequences are padded on the right, so causality alone excludes padding, without a mask.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **unused: Any
    ) -> torch.Tensor:
        """Map [S, B, heads, head_dim] to [S, B, heads * head_dim].

        Args:
            query: heads of this tensor rank.
            key: as `query`, with fewer heads if they are grouped.
            value: shaped as `key`.
            attention_mask: None for causal attention; with one query for each sequence bool [B, 1, 1,
                keys], true where it attends.
        """
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if attention_mask is None:
            grouped = q.size(1) != k.size(1)
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped
            )
            return out.permute(2, 0, 1, 3).flatten(2)
        # The query heads of a group attend like tokens of a sequence, so that no key is copied for each of
        # them.
        of_group = q.reshape(*k.shape[:2], -1, q.size(3))
        return F.scaled_dot_product_attention(
            of_group, k, v, attn_mask=attention_mask, scale=self.softmax_scale
        ).flatten(1)[None]


class OutputRows:
    """A selection of the rows whose logits are computed, so that prompts and padding cost nothing.

    Set `index` (int64 [T] into the flattened [S, B]) before a forward pass; the model then returns logits [1,
    T, V / P].
    """

    def __init__(self, model: GPTModel) -> None:
        self.index: torch.Tensor | None = None
        model.output_layer.register_forward_pre_hook(self._select)

    def _select(
        self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        if self.index is None:
            return None
        hidden = inputs[0]
        return hidden.flatten(0, 1).index_select(0, self.index).unsqueeze(1), *inputs[1:]


def transformer_config(
    architecture: Architecture, position: Position, dtype: torch.dtype
) -> TransformerConfig:
    """Return the model's configuration in megatron's terms.

    Raises:
        SettingsError: megatron refuses the combination of model and layout.
    """
    parallel = position.config
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
            qk_layernorm=architecture.qk_norm,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            sequence_parallel=position.sequence_parallel,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            # Weights come from a checkpoint: a random initialization would be wasted.
            perform_initialization=False,
            use_cpu_initialization=position.device.type == "cpu",
            # The step's loss is a plain sum: no division by micro-batches or ranks.
            calculate_per_token_loss=True,
            cuda_graph_scope=[],
        )
    except (ValueError, AssertionError) as error:
        raise SettingsError(f"megatron-core refuses this model in this layout: {error}") from error


def build_model(
    architecture: Architecture,
    config: TransformerConfig,
    position: Position,
    *,
    attention: type[Any] = SelfAttention,
) -> GPTModel:
    """Build this rank's part of the model, with uninitialized weights. A collective: every rank calls it.

    Args:
        architecture: the whole model's.
        config: what `transformer_config` returns.
        position: this rank's place in the layout.
        attention: class of the layers' self-attention; generation has one of its own.
    """
    stages = architecture.layers // config.pipeline_model_parallel_size
    block = TransformerBlockSubmodules(
        layer_specs=[_layer_spec(architecture.qk_norm, attention)] * stages, layer_norm=RMSNorm
    )
    model = GPTModel(
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


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return the rotary frequencies, float32 [head_dim / 2].

    llama3: long wavelengths are stretched by `factor`, short ones kept, those between interpolated.
    """
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type != "llama3":
        return frequencies
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def mark_split(parameters: Mapping[str, torch.Tensor], rules: Iterable[Rule]) -> None:
    """Mark the parameters that are split over tensor ranks.

    So gradient norms count them on every rank, and replicated ones once. megatron does this while it
    initializes weights at random, which is left out here.
    """
    for rule in rules:
        parameter = parameters[rule.parameter]
        if not isinstance(rule, Direct) and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=rule.dim, stride=1)


def _layer_spec(qk_norm: bool, attention: type[Any]) -> ModuleSpec:
    head_norm = RMSNorm if qk_norm else IdentityOp
    projections = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=CausalAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=attention, params={"attn_mask_type": AttnMaskType.causal}, submodules=projections
            ),
            self_attn_bda=_residual,
            pre_mlp_layernorm=RMSNorm,
            mlp=ModuleSpec(module=MLP, submodules=mlp),
            mlp_bda=_residual,
        ),
    )


def _residual(training: bool, fused: bool) -> Any:
    """Return megatron's bias-dropout-add without the dropout, which the models here never have."""

    def add(
        output_and_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, probability: float
    ) -> torch.Tensor:
        output, bias = output_and_bias
        return residual + (output if bias is None else output + bias)

    return add

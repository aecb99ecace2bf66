"""Builds a megatron GPTModel for one rank, with layers of our own spec: no TransformerEngine, no Apex.

Shapes: T tokens of a micro-batch, H hidden size, P tensor ranks; megatron's activations are [T, 1, H].
"""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from protocol.errors import SettingsError
from trainer.megatron.architecture.numbers import Architecture
from trainer.megatron.convert.rules import Direct, Rule, padded_vocabulary
from trainer.megatron.layers import weight_gradients
from trainer.megatron.layers.attention.core import PackedAttention
from trainer.megatron.layers.attention.rotary import inverse_frequencies
from trainer.megatron.layers.dense import RMSNorm
from trainer.megatron.layers.spec import layer_spec
from trainer.megatron.layout import Layout
from trainer.megatron.parallel import Position

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    layers = Layout.of(position.config, architecture.layers).stages[position.pp][0]
    block = TransformerBlockSubmodules(
        layer_specs=[layer_spec(architecture, layer, attention, core_attention) for layer in layers],
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
    return model.to(position.device, config.params_dtype)


def mark_split(parameters: Mapping[str, torch.Tensor], rules: Iterable[Rule]) -> None:
    """Mark the parameters that are split over tensor ranks.

    So gradient norms count them on every rank, and replicated ones once. megatron does this while it
    initializes weights at random, which is left out here.
    """
    for rule in rules:
        parameter = parameters[rule.parameter]
        if not isinstance(rule, Direct) and not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=rule.dim, stride=1)

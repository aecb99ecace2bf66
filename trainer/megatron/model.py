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
from trainer.config import ParallelConfig
from trainer.megatron.architecture.experts import Experts
from trainer.megatron.architecture.numbers import Architecture
from trainer.megatron.convert.rules import Direct, Rule, padded_vocabulary
from trainer.megatron.layers import weight_gradients
from trainer.megatron.layers.attention.core import PackedAttention
from trainer.megatron.layers.attention.rotary import Rotary
from trainer.megatron.layers.dense import NORMS
from trainer.megatron.layers.spec import layer_spec
from trainer.megatron.layout import Layout
from trainer.megatron.parallel import Position

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PackedModel(GPTModel):
    """This rank's part of the model, whose last stage ends with hidden states, before the output layer.

    A forward pass takes `packed_seq_params`, which hold the rotary angles. With an inference context, which
    holds them then, it is megatron's own pass, to the logits.
    """

    rotaries: tuple[Rotary, ...]
    """Those of `Architecture.ropes`."""
    embedding_scale: float
    logit_softcap: float

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
        hidden = None
        if self.pre_process:
            hidden = self.embedding(input_ids=input_ids, position_ids=None)
            if inference_context is None:
                # A transposed [1, T, H] has strides of which torch makes T products of one row each, where
                # the weight is frozen.
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
            gated_linear_unit=architecture.family.gated,
            activation_func=F.silu,  # of no effect: `MLPS` have their own
            add_bias_linear="mlp" in architecture.biases,
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
            **_of_experts(experts, parallel),
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


def _of_experts(experts: Experts, parallel: ParallelConfig) -> dict[str, Any]:
    """Return what megatron itself has to know of experts: that there are any."""
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
        layer_norm=NORMS[architecture.family.norm],
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
        position_embedding_type="none",  # to megatron; attention rotates by `rotaries`
    )
    model.rotaries = tuple(
        Rotary.of(rope, architecture.positioned_dim, position.device) for rope in architecture.ropes
    )
    # As transformers does, in the dtype of the weights.
    model.embedding_scale = torch.tensor(architecture.embedding_scale, dtype=config.params_dtype).item()
    model.logit_softcap = architecture.logit_softcap
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

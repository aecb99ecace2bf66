"""Replaces CPU kernels of vLLM that repack weights, or rotate incorrectly, with plain torch.

Repacked weights cannot be updated in place, so linear layers and experts compute with the weights as loaded.
The engine's start detects weights that another vLLM release repacks (`rollout/staging/loaded_weights.py`).
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Activation = Callable[[torch.Tensor], torch.Tensor]
LIMIT, SLOPE = 7.0, 1.702
"""Constants of gpt-oss's activation, as in vLLM."""


def _halves(activation: Activation) -> Activation:
    """Return a gated activation: [N, 2 I], gates before ups -> [N, I]."""

    def gated(rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return activation(gate) * up

    return gated


def _alternating(rows: torch.Tensor) -> torch.Tensor:
    """Return gpt-oss's activation of interleaved gates and ups."""
    gate, up = rows[..., ::2].clamp(max=LIMIT), rows[..., 1::2].clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(SLOPE * gate)


ACTIVATIONS: dict[str, Activation] = {
    "silu": _halves(F.silu),
    "gelu": _halves(F.gelu),
    "gelu_tanh": _halves(lambda x: F.gelu(x, approximate="tanh")),
    "swigluoai": _alternating,
}
"""vLLM's name of an activation -> function."""


def keep_weights_plain() -> None:
    """Replace vLLM's functions that repack weights or compute with repacked weights."""
    from vllm.model_executor.layers import utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = F.linear

    if hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        utils.dispatch_cpu_unquantized_gemm = dispatch
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:  # older vLLM
        return
    CPUUnquantizedExperts.process_weights_after_loading = lambda experts, layer: None
    CPUUnquantizedExperts._supports_grouped_gemm = classmethod(lambda cls, config: (True, None))
    CPUUnquantizedExperts.apply = _apply
    _compute_beside_adapters()


def rotate_heads_natively() -> None:
    """Rotate queries [T, H, D], as in latent attention, with vLLM's torch implementation.

    The CPU kernel of vLLM 0.32 is correct only for queries [T, H * D]; log-probabilities of DeepSeek-V2 were
    off by up to 0.4.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kernel = RotaryEmbedding.forward_cpu

    def forward_cpu(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if query.dim() == 2:
            return kernel(self, positions, query, key)
        return self.forward_native(positions, query, key)  # type: ignore[no-any-return]

    RotaryEmbedding.forward_cpu = forward_cpu


def _compute_beside_adapters() -> None:
    """Use the plain expert kernels with adapters, too, where vLLM would select expert adapter kernels."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method

    select: Callable[..., Any] | None = getattr(method, "select_unquantized_moe_backend", None)
    if select is None:  # older vLLM
        return

    def without_adapters(moe_config: Any, *others: Any, **named: Any) -> Any:
        plain = copy.copy(moe_config)
        plain.is_lora_enabled = False
        return select(plain, *others, **named)

    method.select_unquantized_moe_backend = without_adapters


def _apply(
    experts: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    *unused: Any,
    apply_router_weight_on_input: bool = False,
    expert_map: torch.Tensor | None = None,
    **also_unused: Any,
) -> None:
    """Compute an expert layer, or this rank's shard of it; replaces a method of vLLM's experts."""
    weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
    topk_experts = topk_ids if expert_map is None else expert_map[topk_ids]
    biases = experts.w1_bias, experts.w2_bias
    output.copy_(mixture(hidden_states, w1, w2, weights, topk_experts, ACTIVATIONS[activation.value], biases))


def mixture(
    rows: torch.Tensor,
    gates_and_ups: torch.Tensor,
    downs: torch.Tensor,
    weights: torch.Tensor,
    topk_experts: torch.Tensor,
    activation: Activation,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """Return the output [N, H] of a mixture of experts, computed one expert at a time.

    Args:
        rows: [N, H] inputs.
        gates_and_ups: [E, 2 I, H] weights.
        downs: [E, H, I] weights.
        weights: float [N, K], router weight of each chosen expert.
        topk_experts: int [N, K], chosen experts; -1: expert on another rank.
        activation: [N, 2 I] -> [N, I].
        biases: [E, 2 I] and [E, H], or None.
    """
    output = torch.zeros_like(rows)
    for expert in topk_experts[topk_experts >= 0].unique().tolist():
        row, place = (topk_experts == expert).nonzero(as_tuple=True)
        first, second = (bias if bias is None else bias[expert] for bias in biases)
        expert_output = F.linear(
            activation(F.linear(rows[row], gates_and_ups[expert], first)), downs[expert], second
        )
        output.index_add_(0, row, (expert_output * weights[row, place, None]).to(output.dtype))
    return output

"""Has torch compute on a CPU in place of kernels of vLLM that repack weights, or rotate the wrong way.

Repacked weights could not be updated in place: linear layers and experts are computed from the weights as the
loader wrote them. What another release of vLLM repacks nevertheless is found at start
(`rollout/staging/loaded_weights.py`).
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Activation = Callable[[torch.Tensor], torch.Tensor]
LIMIT, SLOPE = 7.0, 1.702
"""Constants of gpt-oss's activation, also in vLLM."""


def _halves(activation: Activation) -> Activation:
    """Return a function of gates and ups [N, 2 I], the gates first, with the result [N, I]."""

    def gated(rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return activation(gate) * up

    return gated


def _alternating(rows: torch.Tensor) -> torch.Tensor:
    """Return gpt-oss's result for gates and ups that come by turns."""
    gate, up = rows[..., ::2].clamp(max=LIMIT), rows[..., 1::2].clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(SLOPE * gate)


ACTIVATIONS: dict[str, Activation] = {
    "silu": _halves(F.silu),
    "gelu": _halves(F.gelu),
    "gelu_tanh": _halves(lambda x: F.gelu(x, approximate="tanh")),
    "swigluoai": _alternating,
}
"""vLLM's name of an activation -> it."""


def keep_weights_plain() -> None:
    """Replace vLLM's functions that repack weights, and the functions that compute with repacked ones."""
    from vllm.model_executor.layers import utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = F.linear

    if hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        utils.dispatch_cpu_unquantized_gemm = dispatch
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:  # an older release
        return
    CPUUnquantizedExperts.process_weights_after_loading = lambda experts, layer: None
    CPUUnquantizedExperts._supports_grouped_gemm = classmethod(lambda cls, config: (True, None))
    CPUUnquantizedExperts.apply = _apply
    _compute_beside_adapters()


def rotate_heads_natively() -> None:
    """Have queries [T, H, D], as latent attention makes them, rotated by vLLM's function in torch.

    The kernel of vLLM 0.32 is right for queries [T, H * D] alone. Log-probabilities of DeepSeek-V2 were off
    by up to 0.4.
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
    """Have experts computed so beside adapters, too, where vLLM chooses kernels for adapters of experts."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method

    select: Callable[..., Any] | None = getattr(method, "select_unquantized_moe_backend", None)
    if select is None:  # an older release
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
    """Take the place of the experts' method that computes a layer, or this rank's share of it."""
    weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
    chosen = topk_ids if expert_map is None else expert_map[topk_ids]
    biases = experts.w1_bias, experts.w2_bias
    output.copy_(mixture(hidden_states, w1, w2, weights, chosen, ACTIVATIONS[activation.value], biases))


def mixture(
    rows: torch.Tensor,
    gates_and_ups: torch.Tensor,
    downs: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    activation: Activation,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """Return what experts make of rows, [N, H], one expert after the other.

    Args:
        rows: [N, H].
        gates_and_ups: [E, 2 I, H].
        downs: [E, H, I].
        weights: float [N, K]: of each row's experts.
        chosen: int [N, K]: each row's experts; -1: one that another rank has.
        activation: makes [N, I] of [N, 2 I].
        biases: [E, 2 I] and [E, H].
    """
    output = torch.zeros_like(rows)
    for expert in chosen[chosen >= 0].unique().tolist():
        row, place = (chosen == expert).nonzero(as_tuple=True)
        first, second = (bias if bias is None else bias[expert] for bias in biases)
        made = F.linear(activation(F.linear(rows[row], gates_and_ups[expert], first)), downs[expert], second)
        output.index_add_(0, row, (made * weights[row, place, None]).to(output.dtype))
    return output

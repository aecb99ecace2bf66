"""Defines the layer whose MLP is a choice of experts per token, and the stacked experts of a rank.

Shapes: S, B leading dimensions; T = S B tokens of this rank, H hidden size; E experts of the layer, L of them
on a rank; k experts per token; F width of an expert, F' columns of it on a rank.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.megatron.families.experts import Experts
from trainer.megatron.layers.dense import SwigluMLP, swiglu
from trainer.megatron.layers.experts.balance import RoutedTokens
from trainer.megatron.layers.experts.dispatch import Exchange, ExpertOrder
from trainer.megatron.layers.experts.router import ExpertRouter
from trainer.megatron.layers.layer import Layer
from trainer.megatron.layers.tensor_parallel import empty_parameter, whole_parameter

ALIGNED = 8
"""Sizes of bfloat16 matrices in torch's grouped product must be multiples of this number: 16 bytes."""


def stack(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """Return an uninitialized parameter of experts.

    An attribute makes megatron reduce its gradients over the ranks with the same experts, and update it
    separately.
    """
    parameter = empty_parameter(config, *shape)
    parameter.allreduce = False  # type: ignore[attr-defined]
    return parameter


def expert_products(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the products [R, m]: with one kernel on a GPU in bfloat16, otherwise one product per expert.

    Args:
        rows: [R, n], sorted by expert.
        weights: [L, m, n].
        counts: int64 [L]: number of rows per expert, on the host or on the device.
    """
    if rows.is_cuda and counts_stay_on_device(rows.dtype, *weights.shape[1:]):
        return grouped(rows, weights, counts)
    return looped(rows, weights, counts)


def counts_stay_on_device(dtype: torch.dtype, *sizes: int) -> bool:
    """Return whether a GPU multiplies matrices of these sizes without the row counts on the host."""
    return dtype is torch.bfloat16 and not any(size % ALIGNED for size in sizes)


def grouped(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Compute `expert_products` with torch's grouped product, without synchronizing host and device."""
    ends = counts.to(rows.device, non_blocking=True).cumsum(0).int()
    return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


def looped(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Compute `expert_products` with one product per expert; the reference of `grouped`."""
    parts = rows.split(counts.tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights.unbind(), strict=True)])


def clamped_swiglu(x: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """Return (up + 1) * gate * sigmoid(alpha * gate) of [..., 2 F], where gate and up columns alternate.

    `limit` bounds the gate from above, and up from both sides.
    """
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


class ClampedExperts(torch.nn.Module):
    """This rank's experts in the checkpoint's format: `fc1` [L, H, 2 F'], `fc2` [L, F', H], and biases.

    `fc1_bias` is [L, 2 F']. The outputs of ranks that share experts are summed, so each rank has and adds
    only its part of `fc2_bias` [L, H].
    """

    def __init__(self, config: TransformerConfig, experts: Experts) -> None:
        super().__init__()
        ranks = mpu.get_expert_tensor_parallel_world_size()
        here = experts.count // mpu.get_expert_model_parallel_world_size()
        wide, hidden = experts.intermediate // ranks, config.hidden_size
        self.experts = experts
        self.fc1 = stack(config, here, hidden, 2 * wide)
        self.fc1_bias = stack(config, here, 2 * wide)
        self.fc2 = stack(config, here, wide, hidden)
        self.fc2_bias = stack(config, here, hidden // ranks)
        before = mpu.get_expert_tensor_parallel_rank() * (hidden // ranks)
        self._around = (before, hidden - before - hidden // ranks)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Compute each expert's rows; arguments and result as in `LocalExperts`."""
        inner = expert_products(rows, self.fc1.transpose(1, 2), counts) + _biases_of_rows(
            self.fc1_bias, counts, rows
        )
        inner = clamped_swiglu(inner, self.experts.swiglu_limit, self.experts.swiglu_alpha)
        bias = F.pad(self.fc2_bias, self._around)
        return expert_products(inner, self.fc2.transpose(1, 2), counts) + _biases_of_rows(bias, counts, rows)


def _biases_of_rows(biases: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the bias of each row's expert, [R, n], from biases [L, n]."""
    return biases.repeat_interleave(counts.to(rows.device, non_blocking=True), 0, output_size=len(rows))


class ExpertLayer(Layer):
    """Layer with an `ExpertMLP`; its `mlp` in a spec is empty."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        experts: Experts,
        layer: int,
        mlp: type["ExpertMLP"] | None = None,
        **others: Any,
    ) -> None:
        """Build the layer.

        Args:
            config: megatron's configuration of the model.
            experts: numbers of the model's experts.
            layer: index of the layer in the whole model.
            mlp: class of the MLP, `ExpertMLP` or a subclass.
            others: arguments of `Layer`.
        """
        super().__init__(config=config, **others)
        self.mlp = (mlp or ExpertMLP)(config, experts, layer)

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, *, packed_seq_params: Any = None, **others: Any
    ) -> Any:
        """Compute the layer.

        The routers' token metadata is passed to the MLP as megatron's `padding_mask`, the only argument that
        megatron forwards even when it recomputes the MLP.
        """
        others["padding_mask"] = None if packed_seq_params is None else packed_seq_params.routed
        return super().forward(hidden_states, packed_seq_params=packed_seq_params, **others)


class LocalExperts(torch.nn.Module):
    """This rank's experts, stacked per projection: `fc1` [L, 2 F', H], gate first; `fc2` [L, H, F']."""

    def __init__(self, config: TransformerConfig, experts: Experts) -> None:
        super().__init__()
        ranks = mpu.get_expert_tensor_parallel_world_size()
        here = experts.count // mpu.get_expert_model_parallel_world_size()
        wide, hidden = experts.intermediate // ranks, config.hidden_size
        self.fc1 = stack(config, here, 2 * wide, hidden)
        self.fc2 = stack(config, here, hidden, wide)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Compute each expert's rows.

        Args:
            rows: [R, H], sorted by expert.
            counts: int64 [L]: number of rows per expert, on the host or on the device.

        Returns:
            [R, H]: this rank's summand, if other ranks share its experts.
        """
        return expert_products(swiglu(expert_products(rows, self.fc1, counts)), self.fc2, counts)


class SharedGate(torch.nn.Module):
    """Weight of the shared MLP for each token: the sigmoid of a dot product."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = whole_parameter(config, 1, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [S, B, H] to [S, B, 1]."""
        return torch.sigmoid(F.linear(x, self.weight))


class ExpertMLP(torch.nn.Module):
    """Router, experts, and their exchange, plus the shared MLP if the model has one.

    No token is dropped, for any number of tokens per expert. Tensor ranks with the same tokens, as in
    generation, split the matrices of every expert, and each computes a summand for all tokens.
    """

    def __init__(self, config: TransformerConfig, experts: Experts, layer: int) -> None:
        super().__init__()
        self.router = ExpertRouter(config, experts, layer)
        self.experts = self.make_experts(config, experts)
        width = experts.shared_intermediate
        self.shared = SwigluMLP(config, width) if width else None
        self.shared_gate = SharedGate(config) if experts.shared_gate else None
        self.size = mpu.get_expert_model_parallel_world_size()
        self.copies = mpu.get_expert_tensor_parallel_world_size()
        self.sums = config.tensor_model_parallel_size > 1 and not config.sequence_parallel

    def make_experts(self, config: TransformerConfig, experts: Experts) -> torch.nn.Module:
        """Return this rank's experts, a module of (rows sorted by expert, number of rows per expert)."""
        return (ClampedExperts if experts.swiglu_limit else LocalExperts)(config, experts)

    def forward(
        self, hidden_states: torch.Tensor, padding_mask: RoutedTokens | None = None
    ) -> tuple[torch.Tensor, None]:
        """Map [S, B, H] to the same shape, and None as bias.

        Args:
            hidden_states: inputs of the MLP.
            padding_mask: metadata of the tokens, see `ExpertLayer`.
        """
        x = hidden_states.flatten(0, 1)
        routing = self.router(x, padding_mask)
        order = ExpertOrder(routing.experts, self.router.experts.count)
        outputs = self._outputs(order.rows_of(x), order.counts)
        total = order.combine(outputs, routing.weights.to(outputs.dtype)).view_as(hidden_states)
        if self.sums:
            total = reduce_from_tensor_model_parallel_region(total)
        return total if self.shared is None else total + self._shared(hidden_states, self.shared), None

    def _shared(self, x: torch.Tensor, mlp: SwigluMLP) -> torch.Tensor:
        output: torch.Tensor = mlp(x)[0]
        return output if self.shared_gate is None else self.shared_gate(x) * output

    def _outputs(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if self.sums or self.size * self.copies == 1:
            found: torch.Tensor = self.experts(rows, counts)
            return found
        group = mpu.get_expert_tensor_and_model_parallel_group()
        exchange = Exchange(counts, self.size, self.copies, group)
        return exchange.return_rows(self.experts(exchange.send(rows), exchange.counts))

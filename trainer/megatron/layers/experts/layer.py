"""Defines the layer whose MLP is a choice of experts for each token.

Shapes: S, B leading dimensions; T = S B tokens of this rank, H hidden size; E experts of the layer, of which
a rank has L; k experts for a token; F width of an expert, of which a rank has F' columns.
"""

import trainer.megatron.cpu  # noqa: F401 (before megatron-core)

# isort: split
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from trainer.megatron.architecture.experts import Experts
from trainer.megatron.layers.dense import SwigluMLP, swiglu
from trainer.megatron.layers.experts.clamped import ClampedStack
from trainer.megatron.layers.experts.dispatch import Exchange, Order
from trainer.megatron.layers.experts.router import Router
from trainer.megatron.layers.experts.stacks import linear, stack
from trainer.megatron.layers.experts.tokens import RoutedTokens


class ExpertLayer(TransformerLayer):
    """A layer whose MLP is an `ExpertMLP`; in a spec its `mlp` is empty."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        experts: Experts,
        layer: int,
        mlp: type["ExpertMLP"] | None = None,
        **others: Any,
    ) -> None:
        """Build it.

        Args:
            config: megatron's.
            experts: the model's.
            layer: its number in the whole model.
            mlp: class of the MLP, `ExpertMLP` or what derives from it.
            others: what `TransformerLayer` takes.
        """
        super().__init__(config=config, **others)
        self.mlp = (mlp or ExpertMLP)(config, experts, layer)

    def forward(self, *args: Any, packed_seq_params: Any = None, **others: Any) -> Any:
        """Compute the layer, as megatron's.

        What the router has to know of the tokens goes to the MLP as megatron's `padding_mask`, the only
        argument that it hands over, also where it recomputes the MLP.
        """
        others["padding_mask"] = None if packed_seq_params is None else packed_seq_params.routed
        return super().forward(*args, packed_seq_params=packed_seq_params, **others)


class ExpertStack(torch.nn.Module):
    """This rank's experts, a stack for each projection: `fc1` [L, 2 F', H], gate first; `fc2` [L, H, F']."""

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
            counts: int64 [L]: rows of each expert, on the host or on the device.

        Returns:
            [R, H]: this rank's summand, if others share its experts.
        """
        return linear(swiglu(linear(rows, self.fc1, counts)), self.fc2, counts)


class ExpertMLP(torch.nn.Module):
    """Router, experts, and the way between them. Every token is computed, however many choose an expert."""

    def __init__(self, config: TransformerConfig, experts: Experts, layer: int) -> None:
        super().__init__()
        self.router = Router(config, experts, layer)
        self.experts = (ClampedStack if experts.swiglu_limit else ExpertStack)(config, experts)
        if experts.shared_intermediate:
            self.shared = SwigluMLP(config, wide=experts.shared_intermediate)
        self.size = mpu.get_expert_model_parallel_world_size()
        self.copies = mpu.get_expert_tensor_parallel_world_size()

    def forward(
        self, hidden_states: torch.Tensor, padding_mask: RoutedTokens | None = None
    ) -> tuple[torch.Tensor, None]:
        """Map [S, B, H] to the same shape, and no bias.

        Args:
            hidden_states: inputs.
            padding_mask: describes the tokens, see `ExpertLayer`.
        """
        x = hidden_states.flatten(0, 1)
        routing = self.router(x, padding_mask)
        order = Order(routing.experts, self.router.experts.count)
        outputs = order.by_token(self._outputs(order.rows_of(x), order.counts))
        weights = routing.weights[:, None].to(outputs.dtype)
        found = torch.bmm(weights, outputs).view_as(hidden_states)
        if self.router.experts.shared_intermediate:
            found = found + self.shared(hidden_states)[0]
        return found, None

    def _outputs(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if self.size * self.copies == 1:
            found: torch.Tensor = self.experts(rows, counts)
            return found
        group = mpu.get_expert_tensor_and_model_parallel_group()
        exchange = Exchange(counts, self.size, self.copies, group)
        return exchange.give_back(self.experts(exchange.send(rows), exchange.counts))

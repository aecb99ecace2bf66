"""Chooses the experts of each token and their weights, records the choice, and validates recorded choices.

Shapes: T tokens of this rank, H hidden size, E experts of the layer, k of them per token.

Routing replay: arXiv 2510.11370.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig

from protocol.errors import SettingsError, TetherError
from trainer.megatron.families.experts import Experts
from trainer.megatron.layers.experts.balance import RoutedTokens, auxiliary_loss, tokens_by_sample, z_loss
from trainer.megatron.layers.tensor_parallel import whole_parameter


@dataclass(frozen=True, slots=True)
class Routing:
    """Choice of a router for its tokens."""

    experts: torch.Tensor
    """int64 [T, k]."""
    weights: torch.Tensor
    """float32 [T, k]: factor of each chosen expert's output."""


class ExpertRouter(torch.nn.Module):
    """Router of one layer, replicated on every rank.

    Scores are float32, computed from logits in the parameters' dtype, as in Hugging Face and vLLM. In
    sequence-parallel regions, tensor ranks have different tokens, and an attribute of the weight makes
    megatron sum its gradient.
    """

    loads: torch.Tensor
    """float32 [E]: this rank's tokens per expert in training passes since `forget`."""

    def __init__(self, config: TransformerConfig, experts: Experts, layer: int) -> None:
        """Create the router with an uninitialized weight.

        Args:
            config: megatron's configuration, including the balancing coefficients.
            experts: numbers of the model's experts.
            layer: index of the layer in the whole model.
        """
        super().__init__()
        self.config, self.experts, self.layer = config, experts, layer
        self.weight = whole_parameter(config, experts.count, config.hidden_size)
        bias = torch.zeros(experts.count, dtype=torch.float32, device=self.weight.device)
        self.bias = torch.nn.Parameter(bias, requires_grad=False) if experts.bias else None
        self.logit_bias = whole_parameter(config, experts.count) if experts.biases else None
        self.forget()

    def forget(self) -> None:
        """Reset the loads to 0."""
        self.loads = torch.zeros(self.experts.count, device=self.weight.device)

    def forward(self, x: torch.Tensor, tokens: RoutedTokens | None) -> Routing:
        """Route tokens [T, H].

        Args:
            x: inputs of the layer's experts.
            tokens: metadata of the tokens; None: loads are neither counted nor balanced.
        """
        logits = self._logits(x)
        scores = scores_of(logits, self.experts)
        chosen = choose(scores, self.experts, self.bias)
        if tokens is not None and tokens.experts is not None:
            given = tokens.experts[self.experts.sparse_layers_before(self.layer)]
            chosen = torch.where(given >= 0, given, chosen)
        weights = weights_of(scores, chosen, self.experts)
        # With recomputation, only the second pass has gradients, so only that pass is counted.
        if tokens is not None and torch.is_grad_enabled():
            weights = self._balanced(weights, logits, scores, chosen, tokens)
        return Routing(chosen, weights)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the router's logits, float32 [T, E]."""
        weight, bias = self.weight, self.logit_bias
        if not self.experts.precise:
            return F.linear(x, weight, bias).float()
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())

    def _balanced(
        self,
        weights: torch.Tensor,
        logits: torch.Tensor,
        scores: torch.Tensor,
        chosen: torch.Tensor,
        tokens: RoutedTokens,
    ) -> torch.Tensor:
        """Count the choices; return the weights with the gradients of the balancing losses attached."""
        counts = tokens_by_sample(chosen, self.experts.count, tokens)
        self.loads += counts.sum(0)
        if self.config.moe_aux_loss_coeff:
            group = _ranks_of_samples(self.config)
            even = scores / scores.sum(-1, keepdim=True) if self.experts.scoring == "sigmoid" else scores
            loss = auxiliary_loss(even, counts, tokens, self.experts.per_token, group)
            weights = MoEAuxLossAutoScaler.apply(weights, self.config.moe_aux_loss_coeff * loss)
        if self.config.moe_z_loss_coeff:
            weights = MoEAuxLossAutoScaler.apply(
                weights, self.config.moe_z_loss_coeff * z_loss(logits, tokens)
            )
        return weights


def scores_of(logits: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Return the scores, float32 [T, E], of logits, float32 [T, E]."""
    return torch.softmax(logits, -1) if experts.scoring == "softmax" else torch.sigmoid(logits)


def choose(scores: torch.Tensor, experts: Experts, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the experts of each token, int64 [T, k], chosen by scores [T, E] plus bias [E].

    With groups of experts, only the experts of a token's best groups can be chosen (DeepSeek-V2 and V3, arXiv
    2405.04434 and 2412.19437).
    """
    scores = scores.detach()
    if bias is not None:
        scores = scores + bias
    if experts.groups > 1:
        grouped = scores.unflatten(-1, (experts.groups, -1))
        group_scores = grouped.topk(experts.best_of_group, -1).values.sum(-1)
        best = group_scores.topk(experts.groups_per_token, -1).indices
        left_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best, False)
        scores = grouped.masked_fill(left_out[..., None], -torch.inf).flatten(-2)
    return torch.topk(scores, experts.per_token, -1).indices


def weights_of(scores: torch.Tensor, chosen: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Return the weights, float32 [T, k], of `chosen` experts (int64 [T, k]) from scores [T, E]."""
    weights = scores.gather(-1, chosen)
    if experts.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * experts.scale if experts.scale != 1 else weights


def _ranks_of_samples(config: TransformerConfig) -> dist.ProcessGroup | None:
    """Return the ranks with other tokens of the same samples; None if there are no such ranks."""
    if config.sequence_parallel:
        return mpu.get_tensor_and_context_parallel_group()
    return mpu.get_context_parallel_group() if config.context_parallel_size > 1 else None


class RouterRecorder:
    """Recorder of the experts chosen in the last forward pass."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Register hooks on the routers of a model that is entirely on this rank.

        Raises:
            SettingsError: the model has no routers.
        """
        self._chosen: list[torch.Tensor] = []
        routers = [module for module in model.modules() if isinstance(module, ExpertRouter)]
        if not routers:
            raise SettingsError("setting engine.enable_return_routed_experts: the model has no experts")
        for router in routers:
            router.register_forward_hook(self._record)

    def take(self) -> torch.Tensor:
        """Return and clear the experts of all tokens of the last pass.

        int64 [tokens, layers with experts, k], on the host.
        """
        chosen, self._chosen = self._chosen, []
        return torch.stack(chosen, dim=1).cpu()

    def _record(self, router: torch.nn.Module, inputs: Any, routing: Any) -> None:
        self._chosen.append(routing.experts)


def check_recorded(recorded: torch.Tensor | None, experts: Experts, layers: int) -> None:
    """Check that recorded experts fit a model.

    Args:
        recorded: [t, L, K], see `Batch.experts`.
        experts: numbers of the model's experts.
        layers: number of layers of the model.

    Raises:
        TetherError: experts are not recorded, or are from another model. The message names their shape.
    """
    if recorded is None:
        raise TetherError(
            "setting trainer.routing_replay: no engine recorded which experts it chose; groups that were "
            "generated before it was set cannot be trained with it"
        )
    sparse, found = experts.sparse_layers_before(layers), tuple(recorded.shape[1:])
    largest = int(recorded.max()) if len(recorded) else -1
    if found != (sparse, experts.per_token) or largest >= experts.count:
        raise TetherError(
            f"the engine recorded {found[1]} experts of each of {found[0]} layers, up to number {largest}; "
            f"the trainer's model has {experts.per_token} of {experts.count} in each of {sparse}: they have "
            "different models"
        )

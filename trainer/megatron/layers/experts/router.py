"""Chooses the experts of each token and their weights, records the choice, and checks records to replay.

Shapes: T tokens of this rank, H hidden size, E experts of the layer, k of them for a token.

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
    """Choice of a router."""

    experts: torch.Tensor
    """int64 [T, k]."""
    weights: torch.Tensor
    """float32 [T, k]: factor of what each of them puts out."""


class ExpertRouter(torch.nn.Module):
    """The router of one layer, the same on every rank.

    Scores are computed in float32 of logits in the parameters' dtype, as Hugging Face and vLLM do. In
    sequence-parallel regions each tensor rank has other tokens: the mark on the weight makes megatron add up
    its gradient.
    """

    loads: torch.Tensor
    """float32 [E]: how many tokens of this rank chose each expert in training passes since `forget`."""

    def __init__(self, config: TransformerConfig, experts: Experts, layer: int) -> None:
        """Make it with an uninitialized weight.

        Args:
            config: megatron's, also for the coefficients of balancing.
            experts: the model's.
            layer: its number in the whole model.
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
        """Route [T, H].

        Args:
            x: inputs of the layer's experts.
            tokens: describes them; None: loads are neither counted nor balanced.
        """
        logits = self._logits(x)
        scores = scores_of(logits, self.experts)
        chosen = choose(scores, self.experts, self.bias)
        if tokens is not None and tokens.experts is not None:
            given = tokens.experts[self.experts.sparse_layers_before(self.layer)]
            chosen = torch.where(given >= 0, given, chosen)
        weights = weights_of(scores, chosen, self.experts)
        # Where layers are recomputed only the second pass has gradients, so it alone counts.
        if tokens is not None and torch.is_grad_enabled():
            weights = self._balanced(weights, logits, scores, chosen, tokens)
        return Routing(chosen, weights)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 [T, E]."""
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
        """Count the choices, and return weights that carry the gradients of balancing losses."""
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
    """Return float32 [T, E] of logits float32 [T, E]."""
    return torch.softmax(logits, -1) if experts.scoring == "softmax" else torch.sigmoid(logits)


def choose(scores: torch.Tensor, experts: Experts, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the experts of each token, int64 [T, k], by scores [T, E] and their bias, [E].

    Where experts are in groups, only those of a token's best groups are chosen from (DeepSeek-V2 and V3,
    arXiv 2405.04434 and 2412.19437).
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
    """Return the weights of the experts `chosen` (int64 [T, k]), float32 [T, k], by scores [T, E]."""
    weights = scores.gather(-1, chosen)
    if experts.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * experts.scale if experts.scale != 1 else weights


def _ranks_of_samples(config: TransformerConfig) -> dist.ProcessGroup | None:
    """Return the ranks that have other tokens of the same samples; None if there are none."""
    if config.sequence_parallel:
        return mpu.get_tensor_and_context_parallel_group()
    return mpu.get_context_parallel_group() if config.context_parallel_size > 1 else None


class RouterRecorder:
    """The experts of the last forward pass."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Put hooks on the routers of a model that is on this rank as a whole.

        Raises:
            SettingsError: it has none.
        """
        self._chosen: list[torch.Tensor] = []
        routers = [module for module in model.modules() if isinstance(module, ExpertRouter)]
        if not routers:
            raise SettingsError("setting engine.enable_return_routed_experts: the model has no experts")
        for router in routers:
            router.register_forward_hook(self._record)

    def take(self) -> torch.Tensor:
        """Return the experts of all tokens of the last pass and forget them.

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
        experts: the model's.
        layers: of the model.

    Raises:
        TetherError: there are none, or they are another model's; names their shape.
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

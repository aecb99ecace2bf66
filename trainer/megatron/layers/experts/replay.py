"""Records which experts routers choose, and checks such records before they are chosen again.

Routing replay: arXiv 2510.11370.
"""

from typing import Any

import torch

from protocol.errors import SettingsError, TetherError
from trainer.megatron.families.experts import Experts
from trainer.megatron.layers.experts.router import ExpertRouter


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

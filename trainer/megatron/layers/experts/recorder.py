"""Records which experts the routers of a model choose, by hooks on them."""

from typing import Any

import torch

from protocol.errors import SettingsError
from trainer.megatron.layers.experts.router import ExpertRouter


class ExpertRecorder:
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

"""Records the experts that a transformers model chooses, with hooks on its routers."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.errors import EngineSettingsError

ROUTER = "topkrouter"
"""Suffix of transformers' router class names, in lower case. Routers return logits, weights and experts
[tokens, K]."""


class ExpertRecorder:
    """Recorder of the experts of the last forward pass."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Register hooks on the routers of a model.

        Raises:
            EngineSettingsError: the model has no supported router.
        """
        self._chosen: list[NDArray[np.uint16]] = []
        routers = [module for module in model.modules() if type(module).__name__.lower().endswith(ROUTER)]
        if not routers:
            raise EngineSettingsError(
                f"setting engine.enable_return_routed_experts: {type(model).__name__} has no router whose "
                "choices transformers tells"
            )
        for router in routers:
            router.register_forward_hook(self._record)

    def take(self) -> NDArray[np.uint16]:
        """Return the experts of the last pass, [tokens, L, K], and clear them."""
        chosen, self._chosen = self._chosen, []
        return np.stack(chosen, axis=1)

    def _record(self, router: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        self._chosen.append(outputs[2].to("cpu", torch.int32).numpy().astype(np.uint16))

"""Converts the experts reported by vLLM and SGLang to the form in `Completion`.

Both report a row per input token with all layers of the model, including layers without experts.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import EngineError, EngineSettingsError
from protocol.messages import UNKNOWN_EXPERT

EXPERT = re.compile(r"\blayers\.(\d+)\..*\bexperts\.")
"""Checkpoint names of routed experts' tensors; shared experts do not match."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Expert layout of a model, from its config and checkpoint."""

    layers: tuple[int, ...]
    """Ascending indices of the layers with experts."""
    all_layers: int
    """Number of layers of the model."""
    experts_per_token: int
    """K: experts per token in each expert layer."""

    @classmethod
    def of(cls, names: Iterable[str], model: Mapping[str, Any], model_dir: Path) -> "Mixture":
        """Read the expert layout of a model.

        Args:
            names: tensor names of the checkpoint.
            model: parsed config.json. Layers beyond its last layer (multi-token prediction) do not count.
            model_dir: model directory, for errors.

        Raises:
            EngineSettingsError: no layer has experts, or the config lacks the number of experts per token.
        """
        all_layers, experts_per_token = (
            int(model.get(key) or 0) for key in ("num_hidden_layers", "num_experts_per_tok")
        )
        found = {int(match[1]) for name in names if (match := EXPERT.search(name)) is not None}
        layers = tuple(sorted(layer for layer in found if layer < all_layers))
        if not layers or not experts_per_token:
            raise EngineSettingsError(
                f"setting engine.enable_return_routed_experts: the model in {model_dir} has no experts that "
                "could be recorded"
            )
        return cls(layers, all_layers, experts_per_token)

    def rows(self, data: bytes) -> NDArray[np.int32] | None:
        """Decode int32 [inputs, all layers, K]; None if the size does not match."""
        flat = np.frombuffer(data, np.int32) if len(data) % 4 == 0 else np.empty(0, np.int32)
        whole = flat.size and flat.size % (self.all_layers * self.experts_per_token) == 0
        return flat.reshape(-1, self.all_layers, self.experts_per_token) if whole else None


def recorded_experts(
    request_id: str, rows: NDArray[Any] | None, mixture: Mixture, inputs: int, *, aborted: bool = False
) -> NDArray[np.uint16]:
    """Return the experts of a completion, [inputs, L, K].

    A row that repeats one expert K times is unknown: engines report it for tokens without a forward pass.
    Missing rows at the end of an aborted request are unknown, too.

    Args:
        rows: [inputs, layers of the model, K] as reported by the engine; None: not reported.
        mixture: expert layout of the model.
        inputs: number of prompt and generated tokens, without the last one.
        aborted: whether the request was aborted.

    Raises:
        EngineError: the number of rows differs from `inputs`, or layers are missing.
    """
    if rows is None and aborted:
        rows = np.empty((0, mixture.all_layers, mixture.experts_per_token), np.uint16)
    if (
        rows is None
        or rows.ndim != 3
        or (len(rows) != inputs and not aborted)
        or rows.shape[1] <= mixture.layers[-1]
    ):
        raise EngineError(
            f"request {request_id}: the engine reported experts of shape "
            f"{None if rows is None else list(rows.shape)} for {inputs} inputs, and layers up to "
            f"{mixture.layers[-1]} have some"
        )
    found = rows[:inputs, list(mixture.layers)].astype(np.uint16)
    if found.shape[2] > 1:
        found[(found == found[..., :1]).all(axis=2)] = UNKNOWN_EXPERT
    missing = ((0, inputs - len(found)), (0, 0), (0, 0))
    return np.pad(found, missing, constant_values=UNKNOWN_EXPERT)

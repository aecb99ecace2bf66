"""Converts the experts that vLLM and SGLang report into those that a `Completion` carries.

Both report a row for each token that was an input, of all layers of the model: those without experts, too.
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
"""Names of checkpoints' tensors of routed experts; shared experts' names do not match."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Numbers of a model's experts, from its config and checkpoint."""

    layers: tuple[int, ...]
    """Numbers of the layers that have experts, ascending."""
    all_layers: int
    """Layers of the model."""
    chosen: int
    """K: experts of a token in each of them."""

    @classmethod
    def of(cls, names: Iterable[str], model: Mapping[str, Any], model_dir: Path) -> "Mixture":
        """Read a model.

        Args:
            names: of the checkpoint's tensors.
            model: the model's config.json. Layers after its last one, which predict further tokens, do not
                count.
            model_dir: where both are from.

        Raises:
            EngineSettingsError: no layer has experts, or the config does not say how many a token has.
        """
        all_layers, chosen = (
            int(model.get(key) or 0) for key in ("num_hidden_layers", "num_experts_per_tok")
        )
        found = {int(match[1]) for name in names if (match := EXPERT.search(name)) is not None}
        layers = tuple(sorted(layer for layer in found if layer < all_layers))
        if not layers or not chosen:
            raise EngineSettingsError(
                f"setting engine.enable_return_routed_experts: the model in {model_dir} has no experts that "
                "could be recorded"
            )
        return cls(layers, all_layers, chosen)

    def rows(self, data: bytes) -> NDArray[np.int32] | None:
        """Return int32 [inputs, all layers, K] from its bytes; None if they are of another shape."""
        flat = np.frombuffer(data, np.int32) if len(data) % 4 == 0 else np.empty(0, np.int32)
        whole = flat.size and flat.size % (self.all_layers * self.chosen) == 0
        return flat.reshape(-1, self.all_layers, self.chosen) if whole else None


def recorded_experts(
    request_id: str, rows: NDArray[Any] | None, mixture: Mixture, inputs: int, *, aborted: bool = False
) -> NDArray[np.uint16]:
    """Return the experts of a completion, [inputs, L, K].

    A row of one expert K times is unknown: engines report it where no pass has written. Missing rows at the
    end of an aborted request are unknown, too.

    Args:
        request_id: id of the request.
        rows: [inputs, layers of the model, K], as the engine reports them; None: it reports none.
        mixture: the model's experts.
        inputs: prompt and generated tokens, without the last one.
        aborted: whether the request was aborted.

    Raises:
        EngineError: there are more or fewer rows than inputs, or fewer layers than the model has.
    """
    if rows is None and aborted:
        rows = np.empty((0, mixture.all_layers, mixture.chosen), np.uint16)
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

"""Computes log-probabilities of recorded tokens again, with Hugging Face's model under a version's weights.

Each row is a pass of its own, without padding, cache or packing, with the attention that is written out.
Shapes: T own tokens of a row, V tokens of the vocabulary, G powers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from protocol.device.checkpoint_views import checkpoint_views, model_tensors
from protocol.device.hf_build_lock import MODEL_BUILDING
from protocol.errors import SettingsError
from protocol.rollout_view import RowView
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from services.audit.versions import merged_version

POWERS = (0.5, 0.75, 0.9, 1.1, 1.35, 2.0)
"""Alternatives to the policy p that are proportional to p ** power: other temperatures, [G]."""


@dataclass(frozen=True, slots=True)
class RowScores:
    """Scores of a row's own tokens under one version."""

    logprobs: NDArray[np.float64]
    """[T] nats, of each token after the ones before it."""
    tempered: NDArray[np.float64]
    """[T, G]: log of p_power(token) / p(token), an e-value's logarithm if the token was drawn from p."""


class Recomputer:
    """A model on the CPU whose weights are replaced by a version's."""

    def __init__(
        self, model_dir: Path, dtype: torch.dtype = torch.float32, lora: LoraConfig = NO_ADAPTERS
    ) -> None:
        """Load the initial model of a run, whose versions may be adapters.

        Raises:
            SettingsError: transformers cannot load it.
        """
        try:
            with MODEL_BUILDING:
                model: Any = AutoModelForCausalLM.from_pretrained(
                    model_dir,
                    dtype=torch.float32,  # another one becomes all threads' default while it loads
                    local_files_only=True,
                    attn_implementation="eager",
                    experts_implementation="eager",
                )
        except (OSError, ValueError, KeyError) as error:
            raise SettingsError(f"{model_dir}: transformers cannot load it: {error}") from error
        for parameter in model.parameters():  # not buffers: rotations stay as exact as engines have them
            parameter.data = parameter.data.to(dtype)
        self._model: Any = model.eval().requires_grad_(False)
        self._views = checkpoint_views(self._model, model_tensors(self._model))
        self._lora = lora
        self._base = {name: view.clone() for name, view in self._views.items()} if lora.rank else {}

    @torch.no_grad()
    def serve(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over a version's tensors, by their Hugging Face names.

        Raises:
            SettingsError: the version lacks a tensor of the model, or has one of another shape.
        """
        tensors = merged_version(self._base, tensors, self._lora)
        for name, view in self._views.items():
            if name not in tensors or tensors[name].shape != view.shape:
                raise SettingsError(f"the version has no tensor {name} of shape {tuple(view.shape)}")
        for name, view in self._views.items():
            view.copy_(tensors[name])

    @torch.no_grad()
    def score(
        self, prompt: NDArray[np.int32], row: RowView, temperature: float, *, powers: bool = True
    ) -> RowScores:
        """Return the scores of a row's own tokens, at a temperature; of the first token of all it is 0."""
        tokens = np.concatenate([prompt, row.context, row.tokens]).astype(np.int64)
        first = len(tokens) - len(row.tokens)
        ids = torch.from_numpy(tokens)
        logits = self._model(input_ids=ids[None], use_cache=False).logits[0, max(first - 1, 0) : -1]
        table = torch.log_softmax(logits.double() / temperature, -1)
        chosen = table.gather(-1, ids[max(first, 1) :, None])[:, 0]
        tempered = [p * chosen - torch.logsumexp(p * table, -1) - chosen for p in POWERS if powers]
        both = torch.stack([chosen, *tempered], -1).numpy()
        both = np.concatenate([np.zeros((len(row.tokens) - len(both), both.shape[1])), both])
        return RowScores(both[:, 0], both[:, 1:])
